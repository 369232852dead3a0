"""`lrlhf predict` leaves a file with a line for each row of the prediction set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lrlhf.cli import run
from tests.cli.experiment import experiment

WORDS = "abcdefg"


def answer_length(completions: list[str], answer: list[str]) -> list[float]:
    return [float(len(text) + ord(one)) for text, one in zip(completions, answer, strict=True)]


def predict(kind: str, model_folder: str) -> list[dict[str, Any]]:
    rows = [
        {"prompt": f"say {word}", "answer": word, "chosen": word * 2, "rejected": word}
        for word in WORDS
    ]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options: dict[str, Any] = {"policy": model_folder}
    if kind == "RewardModel":
        options = {"model": {"source": model_folder}}
    config = experiment(
        kind,
        options,
        {"train": "rows.jsonl", "val": "rows.jsonl", "batch_size": 4, "val_batch_size": 3},
        reward=f"{__name__}.answer_length",
        default_root_dir="of the run",
        callbacks=[{"class_path": "PredictionJSONL"}],
    )
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert run(["predict", "--config", "run.yaml"]) == 0
    lines = Path("of the run/predictions.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_of_a_policy_its_responses_their_scores_and_why_they_ended(model_folder: str) -> None:
    written = predict("RLOO", model_folder)
    assert [line["prompt"] for line in written] == [f"say {word}" for word in WORDS]
    for line, word in zip(written, WORDS, strict=True):
        assert line["score"] == len(line["completion"]) + ord(word)
        assert line["finish_reason"] in {"stop", "length"}
        assert line["columns"]["answer"] == word


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_of_a_reward_model_the_scores_of_both(model_folder: str) -> None:
    written = predict("RewardModel", model_folder)
    assert len(written) == len(WORDS)
    scores = [(line["scores0"]["reward"], line["scores1"]["reward"]) for line in written]
    assert len(set(scores)) == len(WORDS)
