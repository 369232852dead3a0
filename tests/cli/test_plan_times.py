"""`lrlhf plan --gpus` says how long an iteration takes, what limits it and how to divide GPUs."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig

from lrlhf.cli import run
from lrlhf.planning.memory import memory_report
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


def _planned(
    capsys: pytest.CaptureFixture[str], *flags: str, module: str = "RLOO", **model: Any
) -> str:
    options = {
        "policy": "model",
        "num_generations": 4,
        "sampling": {"max_new_tokens": 64},
        "engine": {"class_path": "VLLMServerEngine"},
        **model,
    }
    data = {"train": "none.jsonl", "batch_size": 8, "max_prompt_tokens": 32}
    config = experiment(module, options, data, reward="exact_match", strategy="fsdp2")
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


def test_a_reason_why_neither_memory_nor_times_are_known_is_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lrlhf.cli.plan_command.memory_report", memory_report)
    shown = _planned(capsys, "--gpus", "2", policy="./gone")
    assert shown.count("source './gone'") == 1
    assert "no memory table: source './gone'" in shown
    assert shown.rstrip().endswith("no table of times either")
    several = _planned(capsys, "--gpus", "2,4", policy="./gone")  # which show no memory
    assert "no table of times: source './gone'" in several


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
    assert "1 GPUs: no layout fits: each of 1 trainers needs " in shown
    assert " GB, and 15.5 GB are usable; take more GPUs, trainer.strategy: fsdp2" in shown
    assert "seconds of one iteration" not in shown


def test_fewer_prompts_than_gpus_leave_some_idle(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _planned(capsys, "--gpus", "2,8", "--prompts", "2")
    assert _rows(shown)[5][0] == "8 GPUs, in turns on all, 6 idle"
    assert " idle (set --prompts to at least 8: each trainer needs one)" in shown
    # unless told, there are enough for the largest number
    assert "one iteration: 64 prompts × 4 responses" in _planned(capsys, "--gpus", "2,8")


def test_pairs_have_no_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    config = experiment("RewardModel", {"model": "model"}, {"train": "none", "batch_size": 8})
    Path("run.yaml").write_text(yaml.safe_dump(config))
    for flags, error in (
        (["--gpus", "8,64"], "--gpus has several numbers, but no time of "),
        (["--gpus", "8", "--prompts", "4"], "--prompts is for a simulation, and no time of "),
    ):
        assert run(["plan", "--config", "run.yaml", *flags]) == 2
        assert error in capsys.readouterr().err


# of 16 blocks: queries and outputs, keys and values, three matrices, two norms; a last norm
BODY = 16 * (2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048) + 2048
HEAD = 32000 * 2048
PROMPTS = 16384
TRAINER = 0.4 * 989e12
"""FLOP/s."""


def _forward(weights: int, *, prompts: int) -> float:
    """FLOP of 4 responses of 64 tokens to each prompt of 32, which is computed so many times."""
    tokens = PROMPTS * (prompts * 32 + 4 * 64)
    pairs = PROMPTS * (prompts * 32**2 + 4 * (96**2 - 32**2))
    return 2 * weights * tokens + 2 * 16 * 2048 * pairs


def _phases(capsys: pytest.CaptureFixture[str], **model: Any) -> list[float]:
    """Seconds of rewards, log-probabilities and update on one GPU."""
    Path("rollouts.jsonl").write_text(json.dumps({"length": 64}) + "\n")
    flags = ["--gpus", "1", "--prompts", str(PROMPTS), "--response-lengths", "rollouts.jsonl"]
    return [float(cell) for cell in _rows(_planned(capsys, *flags, **model))[0][6:9]]


def test_a_reward_model_takes_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    learned = {"class_path": "LearnedReward", "init_args": {"source": "model"}}
    rewards = {"class_path": "Rewards", "init_args": {"functions": {"preference": learned}}}
    reward, _, _ = _phases(capsys, rewards=rewards)
    # each text by itself, without the output head
    assert reward == pytest.approx(_forward(BODY, prompts=4) / TRAINER, abs=0.06)


def test_a_critic_is_asked_and_updated(capsys: pytest.CaptureFixture[str]) -> None:
    once = {"num_iterations": 1, "num_minibatches": 1}
    options = {"critic": {"model": "model"}, "reference": {"kl_coef": 0.0}, "update": once}
    _, logprob, update = _phases(capsys, module="PPO", **options)
    critic, policy = (_forward(one, prompts=1) for one in (BODY, BODY + HEAD))
    assert logprob == pytest.approx(critic / TRAINER, abs=0.06)
    # three times forward, and 28 bytes for each weight and its step at 0.8 x 3.35 TB/s
    step = 28 * (2 * BODY + 2 * HEAD + HEAD) / 2.68e12
    assert update == pytest.approx(3 * (critic + policy) / TRAINER + step, abs=0.06)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--gpus", "8,x"], "--gpus is 8,x; give a number, or several as in 8,64"),
        (["--gpus", "8,0"], "--gpus is 0; it must be above 0"),
        (["--prompts", "8"], "--prompts is for a simulation, and that needs --gpus"),
        (["--response-lengths", "9"], "--response-lengths is for a simulation, and that needs"),
        (["--reward-seconds", "1"], "--reward-seconds is for a simulation, and that needs --gpus"),
        (["--gpus", "8", "--response-lengths", "65"], "times: --response-lengths is 65"),
        (["--gpus", "8", "--response-lengths", "no.jsonl"], "neither a mean nor a file"),
    ],
)
def test_a_mistake_is_named(
    flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error in _planned(capsys, *flags)
