"""Runs with one planted mistake each, which the diagnosis names first."""

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
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
    "same_samples": {"sampling": Sampling(max_new_tokens=6, temperature=1e-5)},
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
    fields: Callable[[int, int, float], dict[str, Any]] = lambda step, place, score: {},
    options: dict[str, Any] | None = None,
    **metrics: float | Sequence[float],
) -> RunFiles:
    """Write the files of a run, a prompt an iteration; a metric has one value or one a step."""
    steps = range(1, len(scores) + 1)
    columns = {"rollout/response_length": 4, "rollout/score": [np.mean(own) for own in scores]}
    columns |= metrics
    wide = {name: np.broadcast_to(values, len(scores)) for name, values in columns.items()}
    lines = [[step, *own] for step, *own in zip(steps, *wide.values(), strict=True)]
    text = "\n".join(",".join(f"{cell}" for cell in line) for line in (["step", *wide], *lines))
    (folder / "metrics.csv").write_text(f"{text}\n")
    (folder / "hparams.yaml").write_text(json.dumps(options or {}))
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
            **fields(step, place, score),
        }
        for step, own in zip(steps, scores, strict=True)
        for place, score in enumerate(own)
    ]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunFiles(folder)


def names(run: RunFiles) -> list[str]:
    return [one.name for one in diagnose(run).causes]


def level(count: int = 32, *, size: int = 4) -> list[list[float]]:
    """Scores of 0 and 1 that are no better at the end."""
    return [[float((step + place) % 2) for place in range(size)] for step in range(count)]


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


def test_responses_that_are_not_compared_by_prompt_are_compared_by_iteration(
    tmp_path: Path,
) -> None:
    own_group = lambda step, place, score: {"group": place}  # noqa: E731
    kl = {"kl/coef": 5.0, "kl/sequence": 0.1}
    found = diagnose(write_run(tmp_path, level(), fields=own_group, **kl))
    assert found.causes[0].name == "penalty"
    assert "rewards of an iteration differ by 0.5" in found.causes[0].evidence
    assert found.facts["share of iterations that teach"] == 1
    # a critic's advantages teach where all responses to a prompt agree
    pairs = [[float(step % 2)] * 2 + [float(step // 2 % 2)] * 2 for step in range(32)]
    two = lambda step, place, score: {"group": place // 2}  # noqa: E731
    run = write_run(tmp_path, pairs, fields=two, **{"value/explained_variance": 0.9})
    assert names(run) == ["too_noisy"]
    by_name = write_run(tmp_path, pairs, fields=two, options={"algorithm": "reinforce_plus_plus"})
    assert names(by_name) == ["too_noisy"]
    assert names(write_run(tmp_path, pairs, fields=two)) == ["too_hard"]


def test_equal_scores_do_not_differ_by_rounding(tmp_path: Path) -> None:
    found = diagnose(write_run(tmp_path, [[0.1] * 7] * 32))
    assert found.facts["share of groups that teach"] == 0


def test_rare_successes_are_too_hard_before_anything_else(tmp_path: Path) -> None:
    # 1 of 256 is right: it has most of the squared advantages, and the mean spread is tiny
    scores = [[float(step == place == 5) for place in range(8)] for step in range(32)]
    mean = {5: 1 / 8}
    advantage = lambda step, place, score: {"advantage": score - mean.get(step - 1, 0.0)}  # noqa: E731
    kl = {"kl/coef": 0.05, "kl/sequence": 0.1}
    assert names(write_run(tmp_path, scores, fields=advantage, **kl))[0] == "too_hard"


def test_few_large_penalties_do_not_make_a_hard_task_solved(tmp_path: Path) -> None:
    scores = [[-10.0 if step == place == 5 else 0.0 for place in range(8)] for step in range(40)]
    scores[7][3] = 1.0
    assert names(write_run(tmp_path, scores))[0] == "too_hard"


def test_right_answers_by_chance_blame_no_reward(tmp_path: Path) -> None:
    # the answer of the row stands in 5 of 32 texts, that of the prompt before in 3
    held = {1: "a", 9: "b", 14: "a", 20: "b", 27: "a", 4: "b", 12: "b", 18: "b"}
    answers = {step: "ab"[step % 2] for step in range(1, 33)}
    own = {
        step: answers[step] if step in (1, 9, 14, 20, 27) else answers[step - 1] for step in held
    }
    text = lambda step, place, score: {"completion": own.get(step, "none")}  # noqa: E731
    run = write_run(tmp_path, [[0.0]] * 32, answers="ab", fields=text)
    assert names(run)[0] == "too_hard"
    # and where all are right and paid for it, the reward sees them
    right = lambda step, place, score: {"completion": answers[step]}  # noqa: E731
    run = write_run(tmp_path, [[1.0, 1.0]] * 32, answers="ab", fields=right)
    assert names(run)[0] == "solved"


def test_shorter_responses_that_are_no_longer_cut_off_are_not_learning_length(
    tmp_path: Path,
) -> None:
    scores = [[0.0, 0.0, 1.0, 1.0]] * 8 + [[0.0, 1.0, 1.0, 1.0]] * 24
    cut = lambda step, place, score: (  # noqa: E731
        {"length": 40, "finish_reason": "length"} if score == 0 else {"length": 8 + place}
    )
    lengths = {"rollout/response_length": np.linspace(24.0, 12.0, 32)}
    assert "length" not in names(write_run(tmp_path, scores, fields=cut, **lengths))
    # longer ones pay, yet responses became shorter
    long = lambda step, place, score: {"length": 4 + 10 * score}  # noqa: E731
    assert "length" not in names(write_run(tmp_path, scores, fields=long, **lengths))
    lengths = {"rollout/response_length": np.linspace(12.0, 24.0, 32)}
    assert "length" in names(write_run(tmp_path, scores, fields=long, **lengths))


def test_greedy_answers_that_were_good_before_are_no_overfitting(tmp_path: Path) -> None:
    rising = [[0.2 + step / 80, 0.3 + step / 80] for step in range(40)]
    run = write_run(tmp_path, rising)
    write_evaluation(tmp_path, 0, [0.8] * 20)
    write_evaluation(tmp_path, 40, [0.8, 0.81] * 10)
    assert "training_prompts_only" not in names(run)


def test_what_was_learnt_before_the_first_evaluation_is_no_overfitting(tmp_path: Path) -> None:
    # noise of its own in each iteration: the trend of the whole run would show
    levels = [min(step / 40, 1.0) + 0.3 * (-1) ** step for step in range(60)]
    run = write_run(tmp_path, [[level, level + 0.1] for level in levels])
    for step, high in ((40, 0.5), (60, 0.51)):
        write_evaluation(tmp_path, step, [0.1, high] * 10)
    assert "training_prompts_only" not in names(run)


def test_only_the_main_temperature_of_an_evaluation_counts(tmp_path: Path) -> None:
    run = write_run(tmp_path, level(40))
    for step, scores in ((0, (0.5, 0.0)), (40, (0.5, 1.0))):
        rows = [
            {"row": row, "prompt": "p", "completion": "c", "score": score, "temperature": heat}
            for row in range(20)
            for heat, score in zip((0.0, 1.0), scores, strict=True)
        ]
        path = tmp_path / f"eval_scores_{step}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert not diagnose(run).learns


def test_sorted_prompts_are_seldom_taken_for_learning(tmp_path: Path) -> None:
    generator, learns = np.random.default_rng(0), 0
    for _ in range(100):
        noise, scores = generator.normal(size=60), [0.0]
        for own in noise:
            scores.append(0.6 * scores[-1] + 0.8 * own)
        learns += diagnose(write_run(tmp_path, [[own - 1, own + 1] for own in scores[1:]])).learns
    # as if all were independent, 16 of 100 did
    assert learns <= 8


def test_groups_that_dynamic_sampling_left_out_count(tmp_path: Path) -> None:
    padding = lambda step, place, score: {"padding": step % 2 == 0}  # noqa: E731
    idle = {"rollout/zero_variance_groups": 0.95, "rollout/score": 0.01}
    found = diagnose(write_run(tmp_path, level(), fields=padding, **idle))
    assert found.causes[0].name == "too_hard"
    assert "95%" in found.causes[0].evidence


def test_steps_of_minibatches_are_counted_as_steps(tmp_path: Path) -> None:
    options = {"update": {"num_iterations": 2, "num_minibatches": 4}}
    skipped = {"train/skipped_steps": 20.0}  # of 256
    assert "skipped_steps" not in names(write_run(tmp_path, level(), options=options, **skipped))
    assert "skipped_steps" in names(write_run(tmp_path, level(), **skipped))


def test_a_policy_that_became_sure_while_it_learnt_was_not_thrown_off(tmp_path: Path) -> None:
    rising = [[0.0 if place > 1 + step // 8 else 1.0 for place in range(8)] for step in range(40)]
    entropy = {"policy/entropy": np.geomspace(1.0, 0.01, 40)}
    found = diagnose(write_run(tmp_path, rising, **entropy))
    assert found.learns
    assert not found.causes


def test_a_reference_that_follows_says_nothing_of_small_steps(tmp_path: Path) -> None:
    moved = {"kl/sequence": 0.001, "kl/coef": 0.01}
    options = {"reference": {"sync_every": 5}}
    assert "steps_too_small" in names(write_run(tmp_path, level(), **moved))
    assert "steps_too_small" not in names(write_run(tmp_path, level(), options=options, **moved))


def test_a_reward_without_influence_is_named_after_what_stops_all(tmp_path: Path) -> None:
    two = lambda step, place, score: {  # noqa: E731
        "rewards": {"right": score, "form": 0.01 * (place % 3), "same": 0.1}
    }
    moved = {"kl/sequence": 0.001}
    found = diagnose(write_run(tmp_path, level(size=7), fields=two, **moved))
    assert [one.name for one in found.causes] == ["steps_too_small", "one_reward"]
    # what never differs within a group, save by rounding, is not listed
    assert "form hardly counts" in found.causes[1].evidence
    run = write_run(tmp_path, level(size=7), fields=two, options={"algorithm": "gdpo"}, **moved)
    assert names(run) == ["steps_too_small"]


def test_failing_rewards_without_a_name_are_told_without_one(tmp_path: Path) -> None:
    run = write_run(tmp_path, level(), **{"rollout/unscorable_fraction": 0.5})
    cause = diagnose(run).causes[0]
    assert cause.name == "failing_rewards"
    assert "nan" not in cause.evidence
    assert cause.evidence.endswith("teach nothing")


@pytest.mark.filterwarnings("error")
def test_a_run_without_responses_or_scores_is_read(tmp_path: Path) -> None:
    zero = {"rollout/zero_variance_groups": 1.0, "policy/loss": math.inf, "kl/coef": math.nan}
    run = write_run(tmp_path, [[0.0]] * 16, **zero)
    (tmp_path / "rollouts.jsonl").unlink()
    assert names(run) == ["too_hard"]
    none = lambda step, place, score: {"score": None, "advantage": None}  # noqa: E731
    run = write_run(tmp_path, level(), fields=none, **{"rollout/score": math.nan})
    assert names(run) == ["too_short"]
    mixed = lambda step, place, score: {"advantage": None if place else 2.0}  # noqa: E731
    facts = diagnose(write_run(tmp_path, level(), fields=mixed)).facts
    # one of 32 known ones holds 1/32 of the squares
    assert facts["share of squared advantages in the top 1 % of responses"] == 1 / 32


def test_files_that_are_not_as_a_run_writes_them_are_named(tmp_path: Path) -> None:
    for fields in ({"score": [1.0]}, {"rewards": [1.0]}, {"step": None}, {"score": 10**400}):
        write_run(tmp_path, level(), fields=lambda step, place, score, own=fields: own)
        with pytest.raises(ConfigError, match=r"rollouts\.jsonl: a record of step"):
            command([str(tmp_path)])
    write_run(tmp_path, level())
    (tmp_path / "config.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match=r"config\.yaml holds no options"):
        command([str(tmp_path)])
    (tmp_path / "config.yaml").unlink()
    with (tmp_path / "rollouts.jsonl").open("a") as handle:  # still being written
        handle.write('{"step": 33, "sco')
    write_evaluation(tmp_path, 0, [math.nan, 0.5, 0.5])
    write_evaluation(tmp_path, 32, [0.5, 0.5, 0.5])
    command([str(tmp_path)])


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
