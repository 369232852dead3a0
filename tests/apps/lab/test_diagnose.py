"""Runs with one planted mistake each, which the diagnosis names first."""

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from lrlhf import Trainer
from lrlhf.apps.lab import RunFiles
from lrlhf.apps.lab.diagnose_command import diagnose as command
from lrlhf.apps.lab.diagnosis import diagnose
from lrlhf.apps.lab.gradient_signal import GradientSignal, gradient_signal
from lrlhf.datamodules import PromptDataModule
from lrlhf.guard import Guard
from lrlhf.modules import PPO, RLOO, Critic, OptimizerConfig, Reference, Update
from lrlhf.options.errors import ConfigError
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling
from tests.conftest import build_language_model
from tests.modules.policy_runs import SkewedEngine, letters

_RANDOM = random.Random(0)
_STOPS = tuple("aeiou0123456789 .,")


def zero(completions: Sequence[str]) -> list[float]:
    return [0.0] * len(completions)


def one(completions: Sequence[str]) -> list[float]:
    return [1.0] * len(completions)


def opposite(completions: Sequence[str]) -> list[float]:
    return [-value for value in letters(completions)]


def noise(completions: Sequence[str]) -> list[float]:
    return [_RANDOM.gauss(0, 1) for _ in completions]


def large_noise(completions: Sequence[str]) -> list[float]:
    return [100 * value for value in noise(completions)]


def heavy_tails(completions: Sequence[str]) -> list[float]:
    return [value / (1e-6 + _RANDOM.random() ** 2) for value in noise(completions)]


def half_fails(completions: Sequence[str]) -> list[float | None]:
    return [None if row % 2 else value for row, value in enumerate(letters(completions))]


def characters(completions: Sequence[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def kinds(completions: Sequence[str]) -> list[float]:
    """Different letters per character: a policy that says one thing earns little."""
    return [
        len({c for c in text if c.isascii() and c.isalpha()}) / max(len(text), 1)
        for text in completions
    ]


def variety(completions: Sequence[str]) -> list[float]:
    """Different characters per character: nearly all that random weights say, one of six later."""
    return [len(set(text)) / max(len(text), 1) for text in completions]


def train(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    reward: Any = letters,
    *,
    kind: type[RLOO | PPO] = RLOO,
    steps: int = 24,
    lr: float = 3e-3,
    **options: Any,
) -> RunFiles:
    """Train a policy of 27,000 parameters on two-letter prompts."""
    rows = folder / "prompts.jsonl"
    words = ["".join(pair) for pair in itertools.product("abcd", repeat=2)]
    rows.write_text("\n".join(json.dumps({"prompt": f"say {word}"}) for word in words))
    defaults: dict[str, Any] = {
        "num_generations": 8,
        "sampling": Sampling(max_new_tokens=6),
        "optimizer": OptimizerConfig(lr=lr),
        "reference": Reference(kl_coef=0.01),
        "tokenizer": tokenizer,
    }
    rewards = reward if isinstance(reward, Rewards) else Rewards([reward])
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_checkpointing=False,
        val_check_interval=steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1,
    )
    trainer.fit(
        kind(build_language_model(tokenizer), rewards, **(defaults | options)),
        datamodule=PromptDataModule(train=str(rows), batch_size=8, val=str(rows)),
    )
    return RunFiles(folder)


_SLOW_CRITIC = Critic(optimizer=OptimizerConfig(lr=1e-9))
_ENDS = Sampling(max_new_tokens=12, stop=_STOPS)
PLANTED: dict[str, dict[str, Any]] = {
    "steps_too_small": {"lr": 1e-8},
    "steps_too_large": {"lr": 3.0, "reward": variety},
    "no_rate": {"optimizer": OptimizerConfig(lr=3e-3, warmup_steps=10_000)},
    "frozen": {"kind": PPO, "num_generations": 2, "update": Update(freeze_steps=1000)},
    "too_hard": {"reward": zero, "sampling": _ENDS},
    "truncated": {"reward": zero},
    "solved": {"reward": one},
    "failing_rewards": {"reward": Rewards([half_fails], max_unscorable_fraction=1.0)},
    "same_samples": {"sampling": Sampling(max_new_tokens=6, temperature=0.01)},
    "penalty": {"reference": Reference(kl_coef=50.0)},
    "rewards_cancel": {"reward": Rewards([letters, opposite])},
    "one_reward": {"reward": Rewards([letters, large_noise])},
    "outliers": {"reward": heavy_tails},
    "length": {"reward": characters, "sampling": Sampling(max_new_tokens=32, stop=_STOPS)},
    "engine_differs": {"reward": noise, "engine": SkewedEngine(spread=0.5)},
    "skipped_steps": {"guard": Guard(max_skipped=1000, max_kl=1e-9)},
    "critic": {"kind": PPO, "num_generations": 2, "reward": noise, "critic": _SLOW_CRITIC},
    "too_noisy": {"reward": noise},
    "too_short": {"steps": 3, "lr": 1e-5},
}
HEALTHY: dict[str, dict[str, Any]] = {
    "rloo": {},
    "ppo": {"kind": PPO, "num_generations": 2},
    "several letters": {"reward": kinds},
    "responses that end": {"sampling": _ENDS},
}


@pytest.mark.slow
@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_is_named_first(
    cause: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    _RANDOM.seed(0)
    found = diagnose(train(tmp_path, tokenizer, **PLANTED[cause]))
    assert [one.name for one in found.causes][:1] == [cause], found


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_cause(
    name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    found = diagnose(train(tmp_path, tokenizer, **HEALTHY[name]))
    assert found.learns
    assert not found.causes


def write_run(
    folder: Path,
    scores: Sequence[Sequence[float]],
    *,
    texts: Sequence[str] = ("a", "b"),
    answers: Sequence[str] = ("x", "y"),
    **metrics: float,
) -> RunFiles:
    """Write the files of a run with one prompt an iteration."""
    header = ["step", "rollout/response_length", "rollout/score", *metrics]
    means = [float(np.mean(own)) for own in scores]
    lines = [[step, 4, mean, *metrics.values()] for step, mean in enumerate(means, start=1)]
    text = "\n".join(",".join(f"{cell}" for cell in line) for line in (header, *lines))
    (folder / "metrics.csv").write_text(f"{text}\n")
    rows = [
        {
            "step": step,
            "group": 0,
            "prompt": f"prompt {step % len(answers)}",
            "completion": texts[(step + place) % len(texts)],
            "score": score,
            "length": 4,
            "finish_reason": "stop",
            "columns": {"answer": answers[step % len(answers)]},
        }
        for step, own in enumerate(scores, start=1)
        for place, score in enumerate(own)
    ]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunFiles(folder)


def write_evaluation(folder: Path, step: int, scores: Sequence[float]) -> None:
    rows = [
        {"source": "v", "row": row, "prompt": "p", "completion": f"{step}", "score": score}
        for row, score in enumerate(scores)
    ]
    path = folder / f"eval_scores_{step}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_reward_that_misses_right_answers_is_named(tmp_path: Path) -> None:
    # the text of a step is its answer, not that of the prompt before
    run = write_run(tmp_path, [[0.0]] * 32, texts=["it is x", "it is y"])
    assert diagnose(run).causes[0].name == "blind_reward"


def test_answers_that_stand_in_every_text_are_chance(tmp_path: Path) -> None:
    run = write_run(tmp_path, [[0.0, 0.0]] * 32, texts=["x or y", "y or x"])
    assert diagnose(run).causes[0].name == "too_hard"


def test_scores_that_rise_in_training_alone_are_told_from_learning(tmp_path: Path) -> None:
    rising = [[step / 40, step / 40 + 0.1] for step in range(40)]
    run = write_run(tmp_path, rising)
    write_evaluation(tmp_path, 0, [0.5, 0.25] * 10)
    write_evaluation(tmp_path, 40, [0.25, 0.5] * 10)
    found = diagnose(run)
    assert not found.learns
    assert found.causes[0].name == "training_prompts_only"
    write_evaluation(tmp_path, 40, [0.9, 0.8] * 10)
    found = diagnose(run)
    assert found.learns
    assert not found.causes


def test_the_noise_says_how_many_iterations_a_rise_takes(tmp_path: Path) -> None:
    # ±0.1 around a level: s² = 40 · 0.01 / 38; a rise r shows in n: (2.8 s / r)² · 12
    scores = [[0.5 + 0.1 * (-1) ** (step * (step + 1) // 2)] * 2 for step in range(40)]
    found = diagnose(write_run(tmp_path, [[own[0] - 0.2, own[1] + 0.2] for own in scores]))
    assert found.causes[0].name == "too_noisy"
    expected = 12 * (2.8 / 0.05) ** 2 * 0.4 / 38
    assert found.facts["iterations that show a rise of 0.05"] == pytest.approx(expected, rel=0.01)


def test_what_is_no_run_of_a_policy_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,train/loss\n1,0.7\n")
    with pytest.raises(ConfigError, match="is not the run of a policy"):
        command([str(tmp_path)])


def test_the_command_writes_the_diagnosis(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, [[0.0]] * 32, texts=["it is x", "it is y"])
    command([str(tmp_path), "--json", str(tmp_path / "out.json")])
    shown = capsys.readouterr().out
    written = json.loads((tmp_path / "out.json").read_text())
    assert "1. blind_reward: all 32 responses have the score 0" in shown
    assert written["causes"][0]["name"] == "blind_reward"
    assert written["learns"] is False


def test_the_gradient_of_each_prompt_is_that_of_its_responses(
    tmp_path: Path, model_folder: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts, groups = ["say a", "say b", "say c"], []
    for step, prompt in enumerate(prompts, start=1):
        for text, score in (("xy", 1.0), ("zzz", 0.25 * step)):
            ids = tokenizer(text)["input_ids"]
            groups.append(
                {"step": step, "group": 0, "prompt": prompt, "token_ids": ids, "score": score}
            )
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in groups))
    found = gradient_signal(RunFiles(tmp_path), prompts=3, source=model_folder)["score"]

    model = build_language_model(tokenizer)
    gradients = []
    for step, prompt in enumerate(prompts, start=1):
        total = torch.zeros(())
        mean = (1.0 + 0.25 * step) / 2
        for text, score in (("xy", 1.0), ("zzz", 0.25 * step)):
            head = tokenizer(prompt)["input_ids"]
            ids = torch.tensor([[*head, *tokenizer(text)["input_ids"]]])
            logprobs = model(ids).logits.log_softmax(dim=-1)[0, :-1]
            own = logprobs.gather(1, ids[0, 1:, None])[len(head) - 1 :].sum()
            total = total + (score - mean) * own / 2
        weights = [w for w in model.parameters() if w.requires_grad]
        parts = torch.autograd.grad(total, weights, allow_unused=True)
        gradients.append(
            torch.cat(
                [
                    (torch.zeros_like(w) if part is None else part).flatten()
                    for w, part in zip(weights, parts, strict=True)
                ]
            ).double()
        )
    stacked = torch.stack(gradients)
    noise = float((stacked - stacked.mean(dim=0)).square().sum() / 2)
    signal = float(stacked.mean(dim=0).square().sum()) - noise / 3
    assert found.prompts == 3
    assert found.noise == pytest.approx(noise, rel=1e-4)
    assert found.signal == pytest.approx(signal, rel=1e-3)
    assert found.noise_scale == pytest.approx(noise / signal if signal > 0 else np.inf, rel=1e-3)


def test_signal_and_noise_are_unbiased() -> None:
    generator = np.random.default_rng(0)
    mean, found = np.array([1.0, 2.0]), []
    for _ in range(4000):
        own = mean + generator.normal(size=(4, 2)) * [2.0, 1.0]
        sums = float((own.mean(axis=0) ** 2).sum()), float((own**2).sum(axis=1).mean())
        found.append(GradientSignal.of_sums(4, *sums))
    assert np.mean([one.signal for one in found]) == pytest.approx(5.0, abs=0.15)
    assert np.mean([one.noise for one in found]) == pytest.approx(5.0, abs=0.15)
