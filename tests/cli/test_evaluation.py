"""``lrlhf validate``: several sets, several samples, exported models, and the table."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.cli import run
from tests.cli.experiment import experiment
from tests.conftest import build_language_model

REWARD = "tests.modules.policy_runs.letters"
Lines = list[dict[str, Any]]


class Bare(L.LightningModule):
    """Has no option for a model."""


@pytest.fixture
def config(model_folder: str) -> dict[str, Any]:
    for name in ("train", "easy", "hard"):
        rows = [{"prompt": f"{name} {n} + 1 = ", "answer": n + 1} for n in range(4)]
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = [{"question": f"what is {n}?", "answer": n} for n in range(3)]
    Path("asked.jsonl").write_text("\n".join(map(json.dumps, asked)))
    sets = {
        "easy": "easy.jsonl",
        "more": ["easy.jsonl", "hard.jsonl"],
        "asked": {"source": "asked.jsonl", "options": {"prompt_column": "question"}},
    }
    evaluation = {
        "num_samples": 2,
        "metrics": [{"class_path": "NumericAnswer"}],
        "correct": "numeric_answer",
    }
    return experiment(
        "RLOO",
        {"policy": model_folder, "evaluation": evaluation},
        {"train": "train.jsonl", "val": sets, "batch_size": 2},
        reward=REWARD,
        default_root_dir="here",
        callbacks=[{"class_path": "EvalJSONL"}],
        val_check_interval=1,
        num_sanity_val_steps=0,
    )


def start(command: str, config: dict[str, Any], *flags: str) -> int:
    Path("run.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return run([command, "--config", "run.yaml", *flags])


def lines(path: str) -> Lines:
    return [json.loads(line) for line in Path(path).read_bytes().split(b"\n") if line]


def table(text: str) -> dict[str, list[str]]:
    rows = [line.split() for line in text.splitlines() if line.startswith("eval/")]
    return {row[0]: row[1:] for row in rows}


def test_several_sets_and_samples_from_a_config(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("validate", config) == 0
    found = lines("here/eval_scores_0.jsonl")
    assert [line["set"] for line in found] == ["easy"] * 8 + ["more"] * 16 + ["asked"] * 6
    assert {"correct", "answer", "sample", "temperature"} <= found[0].keys()
    assert found[0]["rewards"].keys() == {"letters", "numeric_answer"}
    shown = capsys.readouterr().out
    assert "examples: here/eval_scores_0.jsonl" in shown
    measured = table(shown)
    asked = [line["score"] for line in found if line["set"] == "asked"]
    assert float(measured["eval/asked/score"][0]) == pytest.approx(sum(asked) / 6, rel=1e-3)
    assert [measured[f"eval/{name}score"][-1] for name in ("", "easy/", "more/", "asked/")] == [
        *("15", "4", "8", "3")
    ]
    assert measured["eval/easy/pass@2"][2] == "to"  # with its interval
    assert "eval/more/maj@2" in measured
    assert "Validate metric" not in shown  # Lightning's


def test_an_exported_model_is_evaluated_in_a_folder_of_its_own(
    config: dict[str, Any], model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("validate", config) == 0
    same = lines("here/eval_scores_0.jsonl")
    config["model"]["init_args"]["policy"] = {"source": "nowhere", "lora": {"r": 2}}
    Path("final").symlink_to(model_folder)
    assert start("validate", config, "--ckpt_path", "final") == 0
    name = Path(model_folder).name
    assert lines(f"here/validate/{name}/eval_scores_0.jsonl") == same
    assert f"examples: here/validate/{name}/eval_scores_0.jsonl" in capsys.readouterr().out


def test_a_reward_model_has_accuracies_of_each_set(
    model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, size in (("train", 4), ("a", 3), ("b", 2)):
        pairs = [{"prompt": f"{n} ", "chosen": f"{n}{name}", "rejected": "x"} for n in range(size)]
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    swapped = {"chosen_column": "rejected", "rejected_column": "chosen"}
    sets = {"a": "a.jsonl", "b": "b.jsonl", "c": {"source": "b.jsonl", "options": swapped}}
    settings = experiment(
        "RewardModel",
        {"model": model_folder},
        {"train": "train.jsonl", "val": sets, "batch_size": 2},
        default_root_dir="here",
        callbacks=[{"class_path": "EvalJSONL"}],
    )
    assert start("validate", settings) == 0
    found = lines("here/eval_scores_0.jsonl")
    assert [line["set"] for line in found] == ["a"] * 3 + ["b"] * 2 + ["c"] * 2
    measured = table(capsys.readouterr().out)
    right = [line["scores0"]["reward"] > line["scores1"]["reward"] for line in found]
    for name, own in (("", right), ("a/", right[:3]), ("b/", right[3:5]), ("c/", right[5:])):
        value, _, _, _, number = measured[f"eval/{name}accuracy"]
        assert float(value) == pytest.approx(sum(own) / len(own), rel=1e-3)
        assert int(number) == len(own)
    # the same pairs the other way round
    assert sum(right[3:5]) == 2 - sum(right[5:])
    assert "eval/a/accuracy_low" not in measured


def test_an_exported_reward_model_keeps_the_other_options_of_the_config(model_folder: str) -> None:
    pairs = [{"prompt": f"{n} ", "chosen": f"{n} is a word", "rejected": "x"} for n in range(4)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    found = {}
    for pooling in ("mean", "last"):
        settings = experiment(
            "RewardModel",
            {"model": {"source": model_folder, "pooling": pooling}},
            {"train": "pairs.jsonl", "val": "pairs.jsonl"},
            default_root_dir=pooling,
            callbacks=[{"class_path": "EvalJSONL"}],
        )
        assert start("validate", settings) == 0
        found[pooling] = lines(f"{pooling}/eval_scores_0.jsonl")
    assert found["mean"] != found["last"]
    options = {"source": "nowhere", "pooling": "mean", "lora": {"r": 2}}
    settings["model"]["init_args"]["model"] = options
    assert start("validate", settings, "--ckpt_path", model_folder) == 0
    name = Path(model_folder).name
    assert lines(f"last/validate/{name}/eval_scores_0.jsonl") == found["mean"]


@pytest.mark.parametrize("start_from", ["text", "new adapters", "stored adapters"])
@pytest.mark.parametrize("named", ["ckpt_path", "model.policy"])
def test_an_evaluated_policy_is_compared_with_that_of_the_config(
    model_folder: str, tokenizer: PreTrainedTokenizerBase, start_from: str, named: str
) -> None:
    rows = [{"prompt": f"{n} ", "chosen": f"{n} is a word", "rejected": "x"} for n in range(4)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trained = build_language_model(tokenizer, seed=4)
    trained.save_pretrained("final")
    tokenizer.save_pretrained("final")
    first = build_language_model(tokenizer)
    policy: str | dict[str, Any] = model_folder
    if start_from == "new adapters":
        policy = {"source": model_folder, "lora": {"r": 2}}
    elif start_from == "stored adapters":
        adapted = get_peft_model(first, LoraConfig(r=2, init_lora_weights=False))
        adapted.save_pretrained("adapters")
        first = adapted.merge_and_unload()
        policy = {"source": model_folder, "lora": {"source": "adapters"}}
    settings = experiment(
        "DPO",
        {"policy": policy, "beta": 0.5},
        {"train": "pairs.jsonl", "val": "pairs.jsonl"},
        default_root_dir="here",
        callbacks=[{"class_path": "EvalJSONL"}],
    )
    assert start("validate", settings, f"--{named}", "final") == 0
    folder = "here/validate/final" if named == "ckpt_path" else "here"
    for row, found in zip(rows, lines(f"{folder}/eval_scores_0.jsonl"), strict=True):
        for key, column in (("scores0", "chosen"), ("scores1", "rejected")):
            said = [said_logprob(one, tokenizer, row, column) for one in (trained, first)]
            assert abs(said[0] - said[1]) > 0.01
            assert found[key]["reward"] == pytest.approx(0.5 * (said[0] - said[1]), abs=1e-3)


def test_kto_asks_the_model_that_it_started_from(
    model_folder: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"prompt": f"{n} ", "completion": f"{n} is a word", "label": n > 0} for n in range(3)]
    Path("answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trained, first = build_language_model(tokenizer, seed=4), build_language_model(tokenizer)
    trained.save_pretrained("final")
    tokenizer.save_pretrained("final")
    settings = experiment(
        "KTO",
        {"policy": model_folder, "beta": 0.5},
        {"train": "answers.jsonl", "val": "answers.jsonl"},
        default_root_dir="here",
        callbacks=[{"class_path": "EvalJSONL"}],
    )
    assert start("validate", settings, "--ckpt_path", "final") == 0
    for row, found in zip(rows, lines("here/validate/final/eval_scores_0.jsonl"), strict=True):
        said = [said_logprob(one, tokenizer, row, "completion") for one in (trained, first)]
        assert abs(said[0] - said[1]) > 0.01
        assert found["reward"] == pytest.approx(0.5 * (said[0] - said[1]), abs=1e-3)


def said_logprob(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], column: str
) -> float:
    """What a model makes of an answer and its end, token by token."""
    before, after = (tokenizer(text)["input_ids"] for text in (row["prompt"], row[column]))
    ids = torch.tensor([*before, *after, tokenizer.eos_token_id])
    with torch.no_grad():
        logprobs = model.eval()(ids[None]).logits[0].log_softmax(dim=-1)
    places = range(len(before), len(ids))
    return sum(float(logprobs[place - 1, ids[place]]) for place in places)


def test_a_reference_of_the_config_stays(model_folder: str) -> None:
    rows = [{"prompt": f"{n} ", "chosen": f"{n} is a word", "rejected": "x"} for n in range(2)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for options in ({"reference": model_folder}, {"loss": "simpo"}):
        settings = experiment(
            "DPO",
            {"policy": "nowhere", **options},
            {"train": "pairs.jsonl", "val": "pairs.jsonl"},
            default_root_dir="here",
        )
        assert start("validate", settings, "--ckpt_path", model_folder) == 0


@pytest.mark.parametrize(
    ("monitor", "expected"),
    [
        ("eval/asked/pass@2", ""),
        ("eval/more/maj@2", ""),
        ("eval/askd/pass@2", "did you mean 'eval/asked/pass@2'?"),
        ("eval/asked/pass@4", "RLCheckpoint monitor"),
    ],
)
def test_the_best_checkpoint_is_chosen_by_any_metric(
    config: dict[str, Any], monitor: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = {"class_path": "RLCheckpoint", "init_args": {"dirpath": "saved", "monitor": monitor}}
    config["trainer"] |= {"callbacks": [saver], "enable_checkpointing": True}
    assert start("fit", config) == (2 if expected else 0)
    if expected:
        error = capsys.readouterr().err
        assert expected in error
        assert "Traceback" not in error
        assert not Path("saved").exists()
    else:
        assert Path("saved/step=000001.ckpt").exists()


@pytest.mark.parametrize(
    ("val", "message"),
    [
        ({"a/b": "easy.jsonl"}, "'a/b' cannot name a validation set"),
        ({"t0.7": "easy.jsonl"}, "'t0.7' cannot name a validation set"),
        ({"easy": "esy.jsonl"}, "esy.jsonl"),
        (
            {"easy": {"source": "easy.jsonl", "options": {"prompt_colum": "q"}}},
            "val.easy.options: PromptDataModule has no option 'prompt_colum'",
        ),
        (
            {"easy": {"source": "easy.jsonl", "options": {"prompt_column": "q"}}},
            "easy validation data",
        ),
    ],
)
def test_mistakes_of_validation_sets_are_told_in_a_line(
    config: dict[str, Any], val: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config["data"]["init_args"]["val"] = val
    assert start("check", config) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_module_without_a_model_option_refuses_an_export(
    config: dict[str, Any], model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"class_path": "tests.cli.test_evaluation.Bare"}
    settings = {**config, "model": own}
    assert start("validate", settings, "--ckpt_path", model_folder) == 2
    assert "is an exported model, and" in capsys.readouterr().err


def test_columns_of_metrics_are_checked_and_a_monitor_needs_data(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = config["model"]["init_args"]["evaluation"]
    evaluation["metrics"][0]["init_args"] = {"answer_column": "answr"}
    assert start("check", config) == 2
    assert "reads the column 'answr'" in capsys.readouterr().err
    evaluation["metrics"][0]["init_args"] = {}
    saver = {"class_path": "RLCheckpoint", "init_args": {"monitor": "eval/score"}}
    config["trainer"] |= {"callbacks": [saver], "enable_checkpointing": True}
    del config["data"]["init_args"]["val"]
    assert start("fit", config) == 2
    assert "there is nothing to validate on" in capsys.readouterr().err
