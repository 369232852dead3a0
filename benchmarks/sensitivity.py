"""How much each hyper-parameter of a policy changes what is learnt, one at a time.

The policy is that of `benchmarks/staleness.py`: tiny, with random weights. It has to read its
prompt: after `+` the reward is the share of letters in the response, after `-` the share of
anything else. A policy that does not look at the prompt gets 0.5. The score is the mean reward of
256 fresh responses after the last iteration. Every run has the same iterations, so settings with
more responses or more optimizer steps cost more time; the number of responses per prompt is the
exception, there an iteration has 64 responses whatever it is. *On the way* is the mean score over
all iterations, and tells how early the policy learns; *KL* is that to the policy at the start, in
nats per response.

    python -m benchmarks.sensitivity [--iterations 24] [--seeds 1 2 3] [--out docs/sensitivity.png]
"""

from __future__ import annotations

import argparse
import importlib
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L

from benchmarks.staleness import TOKENIZER, TOKENS, fit_quietly, fresh_responses, interval
from lrlhf.datamodules import PromptDataModule
from lrlhf.modules import RLOO, OptimizerConfig, Reference, Update
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling
from tests.conftest import build_language_model
from tests.modules.policy_runs import letters

PROMPTS = [f"{letter} {sign}" for letter in "abcdefgh" for sign in "+-"]


def as_asked(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Share of letters where the prompt ends in a plus, else of what is no letter."""
    return [
        share if prompt.endswith("+") else 1 - share
        for prompt, share in zip(prompts, letters(completions), strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Hyper-parameters of one run."""

    lr: float = 8e-3
    num_generations: int = 8
    batch_size: int = 8
    """Prompts of an iteration."""
    kl_coef: float = 0.0
    clip_range: float = 0.2
    num_iterations: int = 1
    """Passes over the responses of an iteration, each of one optimizer step."""


BASE = Setting()
SEVERAL_STEPS = replace(BASE, num_iterations=4)
"""Clipping has nothing to do in the first step, which is on-policy."""
RESPONSES = 64
FACTORS: Mapping[str, Mapping[str, Setting]] = {
    "learning rate": {
        f"{lr:g}": replace(BASE, lr=lr) for lr in (1e-3, 4e-3, 8e-3, 1.6e-2, 6.4e-2, 0.5)
    },
    "responses per prompt, 64 in all": {
        str(size): replace(BASE, num_generations=size, batch_size=RESPONSES // size)
        for size in (2, 4, 8, 32)
    },
    "prompts per iteration": {str(size): replace(BASE, batch_size=size) for size in (2, 8, 16)},
    "KL coefficient": {f"{beta:g}": replace(BASE, kl_coef=beta) for beta in (0.0, 0.01, 0.05, 0.2)},
    "clip range, 4 steps per rollout": {
        f"{clip:g}": replace(SEVERAL_STEPS, clip_range=clip) for clip in (0.05, 0.2, 0.5)
    },
    "steps per rollout": {str(n): replace(BASE, num_iterations=n) for n in (1, 4, 8)},
}


class Outcome(NamedTuple):
    """What one run has shown."""

    score: float
    on_the_way: float
    kl: float


class Curve(L.Callback):
    """Keeps what each iteration logs."""

    def __init__(self) -> None:
        self.scores: list[float] = []
        self.kl = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.scores.append(float(trainer.callback_metrics["rollout/score"]))
        self.kl = float(trainer.callback_metrics["kl/sequence"])


def run(setting: Setting, seed: int, iterations: int) -> Outcome:
    """Train once."""
    L.seed_everything(seed, verbose=False)
    curve = Curve()
    module = RLOO(
        build_language_model(TOKENIZER),
        Rewards([as_asked]),
        tokenizer=TOKENIZER,
        num_generations=setting.num_generations,
        sampling=Sampling(max_new_tokens=TOKENS),
        reference=Reference(kl_coef=max(setting.kl_coef, 1e-12)),  # with 0 no KL is measured
        update=Update(
            num_iterations=setting.num_iterations,
            options={"clip_low": setting.clip_range, "clip_high": setting.clip_range},
        ),
        optimizer=OptimizerConfig(lr=setting.lr),
        seed=seed,
    )
    rows = [{"prompt": text} for text in PROMPTS * 2]
    data = PromptDataModule(rows, batch_size=setting.batch_size, seed=seed)
    fit_quietly(module, steps=iterations, callbacks=[curve], data=data)
    assert len(curve.scores) == iterations
    asked = [prompt for prompt in PROMPTS for _ in range(16)]
    scores = as_asked(asked, fresh_responses(module, PROMPTS, seed))
    return Outcome(sum(scores) / len(scores), sum(curve.scores) / iterations, curve.kl)


def draw(results: Mapping[str, Mapping[str, Sequence[Outcome]]], path: Path) -> None:
    """Draw a panel for each factor so far: the seeds as points, their means as lines."""
    figure = importlib.import_module("matplotlib.figure").Figure((10, 5.6), layout="constrained")
    for panel, (factor, rows) in zip(
        figure.subplots(2, 3, sharey=True).flat, results.items(), strict=False
    ):
        for field, colour, label in (("score", "C0", "at the end"), ("on_the_way", "C1", "mean")):
            seeds = [[getattr(one, field) for one in runs] for runs in rows.values()]
            panel.plot([*rows], [interval(values)[0] for values in seeds], colour, label=label)
            for name, values in zip(rows, seeds, strict=True):
                panel.scatter([name] * len(values), values, s=10, c=colour)
        panel.set(xlabel=factor, ylim=(0, 1.02))
        panel.grid(alpha=0.3)
    figure.axes[0].legend()
    for axis in figure.axes[::3]:
        axis.set_ylabel("score")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print a table for each factor, and draw them all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("sensitivity.png"))
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lrlhf"):
        logging.getLogger(name).setLevel(logging.ERROR)
    outcomes: dict[Setting, list[Outcome]] = {}
    results: dict[str, dict[str, list[Outcome]]] = {}
    for factor, settings in FACTORS.items():
        head = f"| {factor} | score of each seed | mean | on the way | KL |"
        print(f"\n{head}\n|---|---|---|---|---|")  # noqa: T201
        for name, setting in settings.items():
            if setting not in outcomes:
                outcomes[setting] = [run(setting, seed, asked.iterations) for seed in asked.seeds]
            columns = Outcome(*zip(*outcomes[setting], strict=True))
            (mean, width), (way, _), (kl, _) = map(interval, columns)
            scores = ", ".join(f"{score:.2f}" for score in columns.score)
            print(  # noqa: T201
                f"| {name} | {scores} | {mean:.2f} ± {width:.2f} | {way:.2f} | {kl:.1f} |",
                flush=True,
            )
        results[factor] = {name: outcomes[setting] for name, setting in settings.items()}
        draw(results, asked.out)


if __name__ == "__main__":
    main()
