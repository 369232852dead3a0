"""Iterations to an evaluation score: prompts drawn by `AdaptivePrompts`, and each once in an epoch.

The policy is that of `benchmarks/staleness.py`: tiny, with random weights. A prompt names the
class of bytes (letters, or anything else) that its response must consist of, and how many count;
the reward is 1 or 0. Both samplers get the same rows, seeds and batch sizes. A run ends when the
mean reward of sampled responses to held-out prompts reaches the goal.

- *pool*: of a tenth of the prompts something can be learnt, half have no right answer, the others
  no wrong one. Evaluated are prompts of the first kind.
- *ladder*: one to eight bytes count, so that long responses are hopeless before short ones are
  learnt. Evaluated are the longest, of both classes: a policy that does not read its prompt gets
  half.
- *letters*: the same with letters alone, so nothing has to be read.
- *all informative*: every prompt has a success rate between 0.2 and 0.65 at the start, so there is
  nothing to win.

    python -m benchmarks.prompt_sampling [--seeds 1 2 3 4 5] [--out prompt_sampling.png]
"""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import random
import string
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L

from benchmarks.staleness import TOKENIZER, fit_quietly, interval
from lrlhf.datamodules import AdaptivePrompts, PromptDataModule
from lrlhf.modules import RLOO, Evaluation, OptimizerConfig, Reference
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling
from tests.conftest import build_language_model

LETTERS = set(string.ascii_letters)
CLASSES: Mapping[str, Callable[[str], bool]] = {
    "+": lambda text: set(text) <= LETTERS,
    "-": lambda text: not set(text) & LETTERS,
    "anything": lambda _: True,
    "nothing": lambda _: False,
}
PROMPTS_PER_ITERATION, EVERY = 16, 2


class Task(NamedTuple):
    """Rows to train on, by their share, and rows to evaluate."""

    shares: Mapping[tuple[str, int], float]
    """Of each kind of prompt and number of bytes that count."""
    held_out: Sequence[tuple[str, int]]
    goal: float
    iterations: int
    prompts: int = 160


TASKS = {
    "pool": Task(
        {("+", 1): 0.05, ("-", 1): 0.05, ("nothing", 1): 0.5, ("anything", 1): 0.4},
        [("+", 1), ("-", 1)],
        0.8,
        100,
    ),
    "ladder": Task(
        {(kind, size): 1 / 16 for kind in "+-" for size in range(1, 9)},
        [("+", 8), ("-", 8)],
        0.8,
        160,
    ),
    "letters": Task({("+", size): 1 / 8 for size in range(1, 9)}, [("+", 8)], 0.8, 80),
    "all informative": Task({("+", 1): 0.5, ("-", 2): 0.5}, [("+", 1), ("-", 2)], 0.9, 60),
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
        float(CLASSES[name](text[:count].ljust(count, "?")))
        for text, name, count in zip(completions, kind, size, strict=True)
    ]


class Curve(L.Callback):
    """Keeps the evaluations, and the share of zero-variance groups, until the goal is reached."""

    def __init__(self, goal: float) -> None:
        self.goal = goal
        self.steps: list[int] = []
        self.scores: list[float] = []
        self.idle: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.idle.append(float(trainer.callback_metrics["rollout/zero_variance_groups"]))

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.steps.append(trainer.global_step)
        self.scores.append(float(trainer.callback_metrics["eval/score"]))
        trainer.should_stop = self.scores[-1] >= self.goal

    @property
    def reached(self) -> float:
        """The iteration at which the goal was reached; infinity: it was not."""
        return self.steps[-1] if self.scores[-1] >= self.goal else math.inf


def run(task: Task, sampler: AdaptivePrompts | None, seed: int) -> Curve:
    """Train once."""
    L.seed_everything(seed, verbose=False)
    curve = Curve(task.goal)
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
    counts = {kind: round(task.prompts * share) for kind, share in task.shares.items()}
    data = PromptDataModule(
        rows_of(counts, seed),
        val=rows_of({kind: 16 // len(task.held_out) for kind in task.held_out}, 1000 + seed),
        batch_size=PROMPTS_PER_ITERATION,
        val_batch_size=16,
        seed=seed,
        prompt_sampler=sampler,
    )
    fit_quietly(
        module,
        steps=task.iterations,
        callbacks=[curve],
        data=data,
        val_check_interval=EVERY,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1,
    )
    return curve


def draw(curves: Mapping[str, Mapping[str, Sequence[Curve]]], path: Path) -> None:
    """Draw a panel for each task, a line for each seed up to the goal."""
    figure = importlib.import_module("matplotlib.figure").Figure((10, 3.4), layout="constrained")
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False).flat
    for panel, (name, samplers) in zip(panels, curves.items(), strict=True):
        for colour, (sampler, runs) in zip(("C1", "C0"), samplers.items(), strict=True):
            for number, one in enumerate(runs):
                label = sampler if number == 0 else None
                panel.plot(one.steps, one.scores, colour, linewidth=1, alpha=0.7, label=label)
                panel.plot(one.steps[-1:], one.scores[-1:], "o", color=colour, markersize=4)
        panel.axhline(TASKS[name].goal, color="k", linewidth=0.8, linestyle=":")
        panel.set(title=name, xlabel="iteration", ylim=(0, 1.02))
        panel.grid(alpha=0.3)
    figure.axes[0].set_ylabel("success rate, held out")
    figure.axes[0].legend(loc="lower right")
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
    print("| task | iterations, uniform | adaptive | times fewer (95 %) | zero-variance groups |")  # noqa: T201
    print("|---|---|---|---|---|")  # noqa: T201
    curves: dict[str, dict[str, list[Curve]]] = {}
    for name in asked.tasks:
        task = TASKS[name]
        curves[name] = {
            sampler: [run(task, options, seed) for seed in asked.seeds]
            for sampler, options in samplers.items()
        }
        reached = [[one.reached for one in runs] for runs in curves[name].values()]
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
