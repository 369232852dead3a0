"""Iterations to an evaluation score: prompts drawn by `AdaptivePrompts`, and each once in an epoch.

The policy is that of `benchmarks/staleness.py`: tiny, with random weights. A prompt names the
class of bytes (letters, digits, signs) that its response must consist of, and how many bytes count;
the reward is 1 or 0. Both samplers get the same rows, seeds, batch sizes and iterations; the score
is the mean reward of sampled responses to held-out prompts.

- *pool*: a tenth of the prompts teach something, half have no right answer, the others have no
  wrong one. Evaluated are prompts of the first kind.
- *ladder*: one to eight bytes count, so that long responses are hopeless before short ones are
  learnt. Evaluated are the longest.
- *all teach*: every prompt has a success rate between 0.1 and 0.5 at the start; there is nothing to
  win.

    python -m benchmarks.prompt_sampling [--seeds 1 2 3 4 5] [--out prompt_sampling.png]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import math
import random
import string
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L

from benchmarks.staleness import TOKENIZER, interval
from lrlhf.datamodules import AdaptivePrompts, PromptDataModule
from lrlhf.modules import RLOO, Evaluation, OptimizerConfig, Reference
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling
from tests.conftest import build_language_model
from tests.modules.policy_runs import fit

LETTERS, DIGITS = set(string.ascii_letters), set(string.digits)
ANY = {chr(code) for code in range(0x110)}
KINDS: Mapping[str, set[str]] = {
    "+": LETTERS,
    "-": ANY - LETTERS,
    "anything": ANY,
    "nothing": set(),
}
PROMPTS_PER_ITERATION, EVERY = 16, 2


class Task(NamedTuple):
    """Rows to train on, by their share, and rows to evaluate."""

    shares: Mapping[tuple[str, int], float]
    """Of each kind of prompt and number of bytes that count."""
    held_out: Sequence[tuple[str, int]]
    goal: float
    iterations: int


TASKS = {
    "pool": Task(
        {("+", 1): 0.05, ("-", 1): 0.05, ("nothing", 1): 0.5, ("anything", 1): 0.4},
        [("+", 1), ("-", 1)],
        0.8,
        120,
    ),
    "ladder": Task(
        {(kind, size): 1 / 16 for kind in "+-" for size in range(1, 9)},
        [("+", 8), ("-", 8)],
        0.8,
        120,
    ),
    "all teach": Task({("+", 1): 0.5, ("-", 2): 0.5}, [("+", 1), ("-", 2)], 0.9, 60),
}


def rows_of(kinds: Mapping[tuple[str, int], int], seed: int) -> list[dict[str, Any]]:
    """Return prompts that are told apart by three random letters."""
    generator = random.Random(seed)
    return [
        {
            "prompt": f"{''.join(generator.choices(string.ascii_lowercase, k=3))} {size} {kind}",
            "kind": kind,
            "size": size,
        }
        for (kind, size), count in kinds.items()
        for _ in range(count)
    ]


def right(completions: Sequence[str], kind: Sequence[str], size: Sequence[int]) -> list[float]:
    """Score 1 where the first bytes are all of the class."""
    return [
        float(len(text) >= count and set(text[:count]) <= KINDS[name])
        for text, name, count in zip(completions, kind, size, strict=True)
    ]


class Curve(L.Callback):
    """Keeps the evaluations, and the share of the groups that taught nothing."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.scores: list[float] = []
        self.idle: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.idle.append(float(trainer.callback_metrics["rollout/zero_variance_groups"]))

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.steps.append(trainer.global_step)
        self.scores.append(float(trainer.callback_metrics["eval/score"]))

    def reached(self, goal: float) -> float:
        """Return the first iteration at which the goal was reached; infinity: at none."""
        at = (step for step, score in zip(self.steps, self.scores, strict=True) if score >= goal)
        return next(at, math.inf)


def run(task: Task, sampler: AdaptivePrompts | None, seed: int) -> Curve:
    """Train once."""
    L.seed_everything(seed, verbose=False)
    curve = Curve()
    longest = max(size for _, size in task.shares)
    module = RLOO(
        build_language_model(TOKENIZER),
        Rewards([right]),
        tokenizer=TOKENIZER,
        num_generations=8,
        sampling=Sampling(max_new_tokens=longest),
        evaluation=Evaluation(num_samples=8, temperatures=(1.0,)),
        reference=Reference(kl_coef=0.0),
        optimizer=OptimizerConfig(lr=4e-3),
        seed=seed,
    )
    counts = {kind: round(320 * share) for kind, share in task.shares.items()}
    data = PromptDataModule(
        rows_of(counts, seed),
        val=rows_of({kind: 32 // len(task.held_out) for kind in task.held_out}, 1000 + seed),
        batch_size=PROMPTS_PER_ITERATION,
        val_batch_size=32,
        seed=seed,
        prompt_sampler=sampler,
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        fit(
            module,
            Path(folder),
            Path(folder),
            steps=task.iterations,
            callbacks=[curve],
            data=data,
            val_check_interval=EVERY,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=-1,
        )
    return curve


def draw(curves: Mapping[str, Mapping[str, Sequence[Curve]]], path: Path) -> None:
    """Draw a panel for each task: the seeds as thin lines, their means as thick ones."""
    figure = importlib.import_module("matplotlib.figure").Figure((10, 3.4), layout="constrained")
    for panel, (name, samplers) in zip(
        figure.subplots(1, len(curves), sharey=True, squeeze=False).flat,
        curves.items(),
        strict=True,
    ):
        for colour, (sampler, runs) in zip(("C7", "C0"), samplers.items(), strict=True):
            for one in runs:
                panel.plot(one.steps, one.scores, colour, linewidth=0.6, alpha=0.5)
            means = [
                sum(scores) / len(runs) for scores in zip(*(r.scores for r in runs), strict=True)
            ]
            panel.plot(runs[0].steps, means, colour, linewidth=2, label=sampler)
        panel.axhline(TASKS[name].goal, color="k", linewidth=0.8, linestyle=":")
        panel.set(title=name, xlabel="iteration", ylim=(0, 1.02))
        panel.grid(alpha=0.3)
    figure.axes[0].set_ylabel("success rate, held out")
    figure.axes[0].legend(loc="upper left")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print a row for each task, and draw the curves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--tasks", nargs="+", default=[*TASKS])
    parser.add_argument("--half-life", type=float, default=AdaptivePrompts().half_life)
    parser.add_argument("--out", type=Path, default=Path("prompt_sampling.png"))
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lrlhf"):
        logging.getLogger(name).setLevel(logging.ERROR)
    samplers = {"uniform": None, "adaptive": AdaptivePrompts(half_life=asked.half_life)}
    print("| task | iterations, uniform | adaptive | times fewer (95 %) | idle groups |")  # noqa: T201
    print("|---|---|---|---|---|")  # noqa: T201
    curves: dict[str, dict[str, list[Curve]]] = {}
    for name in asked.tasks:
        task = TASKS[name]
        curves[name] = {
            sampler: [run(task, options, seed) for seed in asked.seeds]
            for sampler, options in samplers.items()
        }
        reached = [[one.reached(task.goal) for one in runs] for runs in curves[name].values()]
        # what did not get there in time counts as if it had at the end
        ratios = [
            math.log(min(before, task.iterations) / min(after, task.iterations))
            for before, after in zip(*reached, strict=True)
        ]
        mean, width = interval(ratios)
        cells = [", ".join(f"{step:g}" for step in steps) for steps in reached]
        ratio = (
            f"{math.exp(mean):.2f} ({math.exp(mean - width):.2f} to {math.exp(mean + width):.2f})"
        )
        idle = [
            interval([sum(one.idle) / len(one.idle) for one in runs])[0]
            for runs in curves[name].values()
        ]
        row = [name, *cells, ratio, f"{idle[0]:.0%}, {idle[1]:.0%}"]
        print(f"| {' | '.join(row)} |", flush=True)  # noqa: T201
    draw(curves, asked.out)


if __name__ == "__main__":
    main()
