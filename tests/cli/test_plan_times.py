"""`lrlhf plan --gpu` says how long an iteration takes, and how little is known of it."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig

from lrlhf.apps.plan.memory import memory_report
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
    monkeypatch.setattr("lrlhf.apps.plan.plan_command.memory_report", lambda *_: "no memory table")


def _planned(
    capsys: pytest.CaptureFixture[str],
    *flags: str,
    module: str = "RLOO",
    prompts: int = 8,
    **model: Any,
) -> str:
    options = {
        "policy": "model",
        "num_generations": 4,
        "sampling": {"max_new_tokens": 64},
        "engine": {"class_path": "VLLMServerEngine"},
        **model,
    }
    data = {"train": "none.jsonl", "batch_size": prompts, "max_prompt_tokens": 32}
    config = experiment(module, options, data, reward="exact_match", strategy="fsdp2")
    Path("run.yaml").write_text(yaml.safe_dump(config))
    status = run(["plan", "--config", "run.yaml", *flags])
    shown = capsys.readouterr()
    assert status == (2 if shown.err else 0)
    return shown.out + shown.err


def _rows(shown: str) -> dict[str, list[str]]:
    """The cells of the table of times, by phase."""
    lines = [line.strip("| ").split("|") for line in shown.splitlines() if "|" in line]
    cells = [[cell.strip() for cell in line] for line in lines]
    first = next(place for place, line in enumerate(cells) if line[0].endswith(("h100", "h200")))
    return {name: row for name, *row in cells[first + 2 :]}


def _seconds(shown: str) -> dict[str, float]:
    return {name: float(row[3].replace(",", "")) for name, row in _rows(shown).items()}


def test_phases_add_up_to_an_iteration_with_its_range(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _planned(capsys, "--gpus", "2", "--gpu", "h200", prompts=8192)
    assert "data.batch_size × 2 processes" in shown
    assert "| one iteration, 2 × h200 " in shown
    rows, seconds = _rows(shown), _seconds(shown)
    phases = ["generate: prompts", "generate: responses", "weight sync", "log-probabilities"]
    assert list(rows) == [*phases, "reference", "update policy", "iteration"]
    whole = seconds.pop("iteration")
    assert whole == pytest.approx(sum(seconds.values()), rel=0.01)
    low, high = map(float, rows["iteration"][4].split(" – "))
    assert (low, high) == (pytest.approx(whole / 2, rel=0.05), pytest.approx(whole * 2, rel=0.05))
    assert "never compared with a GPU: it may be wrong by a factor of\n2 either way" in shown
    assert "Tokens: 32 of a prompt, 32 of a response, 64 of the longest." in shown
    # a terminal of 80 columns holds what is new here
    new = shown[shown.index("| one iteration, 2") :]
    assert max(map(len, new.splitlines())) <= 80


def test_generation_ahead_goes_on_beside_training(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gpus", "2", "--gpu", "h100"]
    seconds = _seconds(_planned(capsys, *flags, prompts=8192, max_staleness=1))
    whole = seconds.pop("iteration, max_staleness above 0")
    generate = seconds["generate: prompts"] + seconds["generate: responses"]
    assert whole == pytest.approx(max(generate, sum(seconds.values()) - generate), rel=0.01)


def test_a_policy_that_generates_itself_sends_no_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "weight sync" not in _rows(_planned(capsys, "--gpu", "h100", engine=None))


@pytest.mark.parametrize(
    ("engine", "replicas"),
    [
        ({"class_path": "VLLMServerEngine", "init_args": {"replicas": 4}}, 4),
        ({"class_path": "VLLMServerEngine", "init_args": {"url": ["a", "b"]}}, 2),
        ({"class_path": "VLLMEngine", "init_args": {"tensor_parallel_size": 2}}, 4),
    ],
)
def test_replicas_share_the_prompts(
    engine: dict[str, Any], replicas: int, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--gpus", "8", "--gpu", "h100"]
    seconds = _seconds(_planned(capsys, *flags, prompts=8192, engine=engine))
    gpus = replicas * engine["init_args"].get("tensor_parallel_size", 1)
    # 8 x 8192 prompts of 32 tokens, at half of the peak
    pairs = 2 * 16 * 2048 * 32**2
    flops = 8 * 8192 * (2 * (BODY + HEAD) * 32 + pairs)
    assert seconds["generate: prompts"] == pytest.approx(flops / (gpus * 0.5 * 989e12), rel=0.005)


def test_a_reason_why_neither_memory_nor_times_are_known_is_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lrlhf.apps.plan.plan_command.memory_report", memory_report)
    shown = _planned(capsys, "--gpus", "2", "--gpu", "h100", policy="./gone")
    assert shown.count("source './gone'") == 1
    assert "no memory table: source './gone'" in shown
    assert shown.rstrip().endswith("no table of times either")


# of 16 blocks: queries and outputs, keys and values, three matrices, two norms; a last norm, and
# the frequencies of 32 positions, kept twice
BODY = 16 * (2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048) + 2048 + 64
HEAD = 32000 * 2048
PROMPTS = 16384
TRAINER = 0.4 * 989e12
"""FLOP/s."""


def _forward(weights: int, *, prompts: int) -> float:
    """FLOP of 4 responses of 64 tokens to each prompt of 32, which is computed so many times."""
    tokens = PROMPTS * (prompts * 32 + 4 * 64)
    pairs = PROMPTS * (prompts * 32**2 + 4 * (96**2 - 32**2))
    return 2 * weights * tokens + 2 * 16 * 2048 * pairs


FULL = ["--gpu", "h100", "--response-tokens", "64"]


def test_a_reward_model_takes_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    learned = {"class_path": "LearnedReward", "init_args": {"source": "model"}}
    rewards = {"class_path": "Rewards", "init_args": {"functions": {"preference": learned}}}
    seconds = _seconds(_planned(capsys, *FULL, prompts=PROMPTS, rewards=rewards))
    # each text by itself, without the output head
    expected = _forward(BODY, prompts=4) / TRAINER
    assert seconds["score responses: preference"] == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize("rate", [0, 1])
@pytest.mark.parametrize("lora", [None, {"r": 4}])
def test_a_policy_that_teaches_itself_takes_its_time(
    capsys: pytest.CaptureFixture[str], rate: float, lora: dict[str, int] | None
) -> None:
    options = {
        "policy": {"source": "model", "lora": lora},
        "teacher": {"context": "{{ prompt }}!", "update_rate": rate},
    }
    seconds = _seconds(_planned(capsys, *FULL, prompts=PROMPTS, **options))
    # adapters of rank 4 are a thousandth
    expected = _forward(BODY + HEAD, prompts=1) / TRAINER
    assert seconds["teacher"] == pytest.approx(expected, rel=0.01)


def test_a_critic_is_asked_and_updated(capsys: pytest.CaptureFixture[str]) -> None:
    once = {"num_iterations": 1, "num_minibatches": 1}
    options = {"critic": {"model": "model"}, "reference": {"kl_coef": 0.0}, "update": once}
    seconds = _seconds(_planned(capsys, *FULL, module="PPO", prompts=PROMPTS, **options))
    critic, policy = (_forward(one, prompts=1) / TRAINER for one in (BODY, BODY + HEAD))
    assert seconds["values"] == pytest.approx(critic, rel=0.005)
    assert "reference" not in seconds
    # three times forward
    assert seconds["update critic"] == pytest.approx(3 * critic, rel=0.005)
    assert seconds["update policy"] == pytest.approx(3 * policy, rel=0.005)


def test_epochs_and_recomputed_activations_count_again(capsys: pytest.CaptureFixture[str]) -> None:
    options = {
        "policy": {"source": "model", "gradient_checkpointing": True},
        "update": {"num_iterations": 2},
    }
    seconds = _seconds(_planned(capsys, *FULL, prompts=PROMPTS, **options))
    # two epochs of four times forward
    expected = 8 * _forward(BODY + HEAD, prompts=1) / TRAINER
    assert seconds["update policy"] == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--gpus", "0"], "--gpus is 0; it must be above 0"),
        (["--gpus", "8,64"], "gpus"),
        (["--prompts", "8"], "prompts: no such option"),
        (["--response-tokens", "9"], "--response-tokens is for the time of an iteration, which"),
        (
            ["--gpu", "h100", "--response-tokens", "65"],
            "--response-tokens is 65, above model.sampling.max_new_tokens (64)",
        ),
    ],
)
def test_a_mistake_is_named(
    flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = _planned(capsys, *flags)
    assert error in shown
    assert "error: " in shown


def test_pairs_take_no_response_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    config = experiment("RewardModel", {"model": "model"}, {"train": "none", "batch_size": 8})
    Path("run.yaml").write_text(yaml.safe_dump(config))
    flags = ["--gpu", "h100", "--response-tokens", "9"]
    assert run(["plan", "--config", "run.yaml", *flags]) == 2
    assert "needs --gpu and a policy that generates" in capsys.readouterr().err
