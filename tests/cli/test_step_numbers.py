"""Step k is called k in every file and on the terminal, and an evaluation by the step before it."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lrlhf.cli import run
from tests.cli.experiment import experiment
from tests.cli.test_replay import letter_share

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")
STEPS = [1, 2, 3]


@pytest.fixture
def config(model_folder: str) -> dict[str, Any]:
    rows = [{"prompt": f"say {word}", "answer": word} for word in "abcd"]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"policy": model_folder, "optimizer": {"lr": 0.01}}
    data = {"train": "rows.jsonl", "val": "rows.jsonl", "batch_size": 2, "val_batch_size": 4}
    callbacks = {
        "PhaseProgress": {"plain": True},
        "RolloutLog": {"save_tensors": True, "print_every": 1},
        "EvalJSONL": {},
        "RLCheckpoint": {"dirpath": "checkpoints", "every_n_train_steps": 1, "save_top_k": -1},
    }
    trainer = {
        "default_root_dir": ".",
        "max_steps": 3,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": -1,
        "check_val_every_n_epoch": None,
        "val_check_interval": 1,
        "enable_progress_bar": True,
        "enable_checkpointing": True,
        "logger": {"class_path": "ResumingCSVLogger", "init_args": {"save_dir": "."}},
        "callbacks": [{"class_path": k, "init_args": v} for k, v in callbacks.items()],
    }
    reward = f"{letter_share.__module__}.letter_share"
    return experiment("RLOO", options, data, reward=reward, **trainer)


def table(path: str) -> list[dict[str, str]]:
    with Path(path).open(newline="") as handle:
        return list(csv.DictReader(handle))


def records(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def numbers(pattern: str, text: str) -> list[int]:
    return [int(found) for found in re.findall(pattern, text)]


def names(folder: str, pattern: str) -> list[int]:
    listed = "\n".join(sorted(path.name for path in Path(folder).iterdir()))
    return numbers(pattern, listed)


def test_a_step_has_one_number_wherever_it_is_named(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    # these draw curves, which takes longer than the run
    drawn = {"HFExport": {"dirpath": "export", "every_n_steps": 1}, "RunReport": {}}
    config["trainer"]["callbacks"] += [{"class_path": k, "init_args": v} for k, v in drawn.items()]
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert run(["fit", "--config", "run.yaml"]) == 0

    rows = table("metrics.csv")
    assert [int(row["step"]) for row in rows if row["rollout/score"]] == STEPS
    assert [int(row["step"]) for row in rows if row["eval/score"]] == [0, *STEPS]
    assert [int(row["step"]) for row in table("timings.csv")] == STEPS
    assert sorted({record["step"] for record in records("rollouts.jsonl")}) == STEPS
    # weights are counted by the steps behind them
    assert all(one["weight_version"] == one["step"] - 1 for one in records("rollouts.jsonl"))
    assert names("rollouts", r"step_(\d+)") == STEPS
    assert names("checkpoints", r"step=(\d+)") == STEPS
    assert names("export", r"step_(\d+)") == STEPS
    assert names(".", r"eval_scores_(\d+)") == [0, *STEPS]
    for step in (0, *STEPS):
        answered = records(f"eval_scores_{step}.jsonl")
        # in the order of the data, with the right answers
        assert [(one["step"], one["source"], one["row"]) for one in answered] == [
            (step, "rows.jsonl", row) for row in (1, 2, 3, 4)
        ]
        assert [one["columns"]["answer"] for one in answered] == list("abcd")
    out = capsys.readouterr().out
    assert numbers(r"(?m)^step (\d+):", out) == numbers(r"(?m)^step (\d+)/3", out) == STEPS
    assert numbers(r"eval at step (\d+)", out) == [0, *STEPS]
    assert "at step 1 → " in out
    # the row of a step is about the responses of that step
    for row in rows:
        if row["rollout/score"]:
            scores = [
                one["score"] for one in records("rollouts.jsonl") if one["step"] == int(row["step"])
            ]
            assert float(row["rollout/score"]) == pytest.approx(sum(scores) / len(scores))
    for step in STEPS:
        saved = torch.load(next(Path("checkpoints").glob(f"*{step}.ckpt")), weights_only=True)
        assert saved["global_step"] == step
        assert saved["log_rows"]["row"]["step"] == step


def test_an_evaluation_of_a_checkpoint_has_the_step_of_the_checkpoint(
    config: dict[str, Any],
) -> None:
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert run(["fit", "--config", "run.yaml"]) == 0
    (second,) = Path("checkpoints").glob("*2.ckpt")
    expected = Path("eval_scores_2.jsonl").read_text()
    Path("eval_scores_2.jsonl").unlink()

    assert run(["validate", "--config", "run.yaml", f"--ckpt_path={second}"]) == 0

    # the same answers to the same questions
    assert Path("eval_scores_2.jsonl").read_text() == expected
    assert [int(row["step"]) for row in table("validate.csv")] == [2]


def test_what_a_resumed_run_repeats_is_nowhere_twice(config: dict[str, Any]) -> None:
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert run(["fit", "--config", "run.yaml"]) == 0
    kept = ("metrics.csv", "rollouts.jsonl", "eval_scores_3.jsonl")
    whole = {name: Path(name).read_bytes() for name in kept}
    for path in [next(Path("checkpoints").glob(f"*{last}.ckpt")) for last in (2, 1)]:
        assert run(["fit", "--config", "run.yaml", f"--ckpt_path={path}"]) == 0
        assert {name: Path(name).read_bytes() for name in kept} == whole
        assert names("rollouts", r"step_(\d+)") == STEPS


def test_an_evaluation_of_pairs_has_texts_labels_scores_and_rows(model_folder: str) -> None:
    pairs = [
        {"prompt": f"{n} + 1 = ", "chosen": f"{n + 1}", "rejected": f"{n + 2}", "level": n}
        for n in range(3)
    ]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    data = {"train": "pairs.jsonl", "val": "pairs.jsonl", "batch_size": 2}
    trainer = {"default_root_dir": ".", "callbacks": [{"class_path": "EvalJSONL"}]}
    Path("run.yaml").write_text(
        yaml.safe_dump(experiment("RewardModel", {"model": model_folder}, data, **trainer))
    )

    assert run(["validate", "--config", "run.yaml"]) == 0

    seen = records("eval_scores_0.jsonl")
    for number, (line, pair) in enumerate(zip(seen, pairs, strict=True), start=1):
        assert (line["step"], line["source"], line["row"]) == (0, "pairs.jsonl", number)
        texts = [line[name] for name in ("prompt", "candidate0", "candidate1")]
        assert texts == [pair[name] for name in ("prompt", "chosen", "rejected")]
        assert line["labels"] == {"reward": 1.0}
        difference = line["scores0"]["reward"] - line["scores1"]["reward"]
        assert line["margins"]["reward"] == pytest.approx(difference, abs=1e-6)
        assert line["info"] == {"level": pair["level"]}
