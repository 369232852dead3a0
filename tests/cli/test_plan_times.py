"""`lrlhf plan --gpus` says how long an iteration takes, what limits it and how to divide GPUs."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig

from lrlhf.cli import run
from tests.cli.experiment import experiment


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ).save_pretrained("model")
    # memory has tests of its own
    monkeypatch.setattr("lrlhf.cli.plan_command.memory_report", lambda *_: "no memory table")


def _planned(capsys: pytest.CaptureFixture[str], *flags: str, **model: Any) -> str:
    options = {
        "policy": "model",
        "num_generations": 4,
        "sampling": {"max_new_tokens": 64},
        "engine": {"class_path": "VLLMServerEngine"},
        **model,
    }
    data = {"train": "none.jsonl", "batch_size": 8, "max_prompt_tokens": 32}
    config = experiment("RLOO", options, data, reward="exact_match", strategy="fsdp2")
    Path("run.yaml").write_text(yaml.safe_dump(config))
    status = run(["plan", "--config", "run.yaml", *flags])
    shown = capsys.readouterr()
    assert status == (2 if shown.err else 0)
    return shown.out + shown.err


def _rows(shown: str) -> list[list[str]]:
    """The cells of the table of times."""
    lines = [line.strip("| ").split("|") for line in shown.splitlines() if "|" in line]
    cells = [[cell.strip() for cell in line] for line in lines]
    first = next(number for number, line in enumerate(cells) if line[0].startswith("seconds of"))
    return cells[first + 2 :]


def test_each_number_of_gpus_has_its_layouts_and_a_bottleneck(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--prompts", "64", "--response-lengths", "20", "--gpu", "h200"]
    shown = _planned(capsys, "--gpus", "2,8", *flags)

    assert "one iteration/prompts" not in shown  # no plan of a single number
    rows = _rows(shown)
    assert [(row[0], row[3]) for row in rows] == [
        (f"{gpus} GPUs, {how}", staleness)
        for gpus in (2, 8)
        for how, staleness in (
            ("in turns on all", "0"),
            *(("apart", str(one)) for one in (0, 1, 2, 4)),
        )
    ]
    for row in rows:
        trainers, (replicas, parallel) = int(row[1]), map(int, row[2].split(" × "))
        together = "all" in row[0]
        assert trainers + (0 if together else replicas * parallel) == int(row[0].split()[0])
    (two, eight) = [line for line in shown.splitlines() if "bottleneck: " in line]
    assert two.startswith("2 GPUs: ")
    assert eight.startswith("8 GPUs: ")
    assert "a simulation: no GPU was measured" in shown
    assert "h200: 989 TFLOP/s in bfloat16" in shown
    # 64 x 4 responses with their prompts of 32
    assert "one iteration: 64 prompts × 4 responses, 13,3" in shown
    assert "lognormal, mean 20, cut at 64 tokens" in shown


def test_one_number_shows_batches_and_memory_too_and_multiplies_the_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = _planned(capsys, "--gpus", "2")
    assert "data.batch_size × 2 processes" in shown
    assert "no memory table" in shown
    assert "one iteration: 16 prompts × 4 responses" in shown
    assert "lognormal, mean 32, cut at 64 tokens" in shown
    assert "h100: 989 TFLOP/s" in shown


def test_rewards_and_recorded_lengths_count(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rollouts.jsonl").write_text(json.dumps({"length": 7}) + "\n")
    flags = ["--gpus", "1", "--response-lengths", "rollouts.jsonl", "--reward-seconds", "1000"]
    shown = _planned(capsys, *flags)
    assert "those of 1 responses in rollouts.jsonl, mean 7" in shown
    assert _rows(shown)[0][6] == "1000.0"
    assert "bottleneck: rewards" in shown


def test_a_policy_that_generates_itself_does_not_share_gpus(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (row,) = _rows(_planned(capsys, "--gpus", "8", engine=None))
    assert row[:4] == ["8 GPUs, in turns on all", "8", "8 × 1", "0"]


def test_what_does_not_fit_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _planned(capsys, "--gpus", "1", "--gpu-memory", "16")
    assert "1 GPUs: no layout fits; take more GPUs" in shown
    assert "seconds of one iteration" not in shown


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--gpus", "8,x"], "--gpus is 8,x; give a number, or several as in 8,64"),
        (["--gpus", "8,0"], "--gpus is 0; it must be above 0"),
        (["--gpus", "8", "--response-lengths", "65"], "times: --response-lengths is 65"),
        (["--gpus", "8", "--response-lengths", "no.jsonl"], "neither a mean nor a file"),
    ],
)
def test_a_mistake_is_named(
    flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error in _planned(capsys, *flags)
