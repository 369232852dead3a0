"""Training on responses sampled with top_p, with and without their sampling masks.

The policy is that of `benchmarks/sensitivity.py`, tiny and with random weights, and an iteration
has several clipped optimizer steps. One reward, *signs*, is that of the same benchmark. The other,
*noise*, is a random number that no policy can raise: whatever a run does to the policy under it is
bias. Compared are

- *no truncation*: ``top_p`` 1;
- *sampling mask*: probabilities are renormalised over the ids that were left, the default;
- *allowed bias*: ``allow_truncated_sampling``, probabilities over all ids on both sides;
- *engine's ratio*: what a trainer computes that ignores the truncation, the policy's probability
  over all ids divided by the engine's over those that were left.

Scores are those of the responses as sampled, the entropy is the policy's over all ids in nats per
token of these responses, and the log-ratio is that before the first step of an iteration. What is
in the folder already is not trained again.

    python -m benchmarks.truncated_sampling [--top-p 0.8] [--iterations 50] [--seeds 1 2 3]
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch

from benchmarks.sensitivity import PROMPTS, as_asked
from benchmarks.staleness import TOKENIZER, TOKENS, fit_quietly, interval
from lrlhf.datamodules import PromptDataModule
from lrlhf.functional import masked_mean
from lrlhf.models import sequence_outputs
from lrlhf.modules import RLOO, OptimizerConfig, Reference, Update
from lrlhf.rewards import Rewards
from lrlhf.rollout import EngineWrapper, RolloutListener, Sampling, TransformersEngine
from lrlhf.types import Experience, Rollout
from tests.conftest import build_language_model


def noise(completions: Sequence[str]) -> list[float]:
    """Return numbers that have nothing to do with the responses."""
    numbers: list[float] = torch.randn(len(completions)).tolist()
    return numbers


REWARDS: Mapping[str, Any] = {"signs": as_asked, "noise": noise}
FORMS = ("no truncation", "sampling mask", "allowed bias", "engine's ratio")


class EngineRatio(EngineWrapper):
    """Hides how much probability was left, so that the ratio starts from the engine's own."""

    def generate(self, *args: Any, **options: Any) -> Rollout:
        return replace(super().generate(*args, **options), kept_mass=None)


class Point(NamedTuple):
    """One iteration."""

    score: float
    entropy: float
    log_ratio: float


class Curve(RolloutListener, L.Callback):
    """Measures every iteration before its update."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    @torch.no_grad()
    def on_rollout(
        self, trainer: L.Trainer, module: Any, experience: Experience, records: Sequence[Any]
    ) -> None:
        mask = experience.response_mask
        over_all = sequence_outputs(
            module.policy, replace(experience, sampling_mask=None), entropy=True
        )
        first = over_all.logprobs if experience.old_logprobs is None else experience.old_logprobs
        if experience.sampling_mask is not None:
            first = sequence_outputs(module.policy, experience).logprobs
        elif isinstance(module.engine, EngineRatio):
            first = over_all.logprobs
        start = experience.engine_logprobs
        assert over_all.entropy is not None
        self.points.append(
            Point(
                float(experience.scores.mean()),
                float(masked_mean(over_all.entropy, mask)),
                float(masked_mean(first - start, mask)),
            )
        )


def run(form: str, reward: str, seed: int, chosen: argparse.Namespace) -> list[Point]:
    """Train once."""
    L.seed_everything(seed, verbose=False)
    curve, engine = Curve(), TransformersEngine()
    top_p = 1.0 if form == "no truncation" else chosen.top_p
    module = RLOO(
        build_language_model(TOKENIZER),
        Rewards([REWARDS[reward]]),
        tokenizer=TOKENIZER,
        algorithm="grpo",
        engine=EngineRatio(engine) if form == "engine's ratio" else engine,
        num_generations=8,
        sampling=Sampling(max_new_tokens=TOKENS, top_p=top_p),
        allow_truncated_sampling=form in ("allowed bias", "engine's ratio"),
        reference=Reference(kl_coef=0.0),
        update=Update(num_iterations=2, num_minibatches=2),
        optimizer=OptimizerConfig(lr=chosen.lr),
        seed=seed,
    )
    rows = [{"prompt": text} for text in PROMPTS * 2]
    data = PromptDataModule(rows, batch_size=8, seed=seed)
    fit_quietly(module, steps=chosen.iterations, callbacks=[curve], data=data)
    return curve.points


def trained(form: str, reward: str, seed: int, chosen: argparse.Namespace) -> list[Point]:
    """Return the points of a run, from the folder if they are there."""
    path = chosen.folder / f"{reward}.{form.replace(' ', '_')}.{seed}.json"
    if not path.is_file():
        points = run(form, reward, seed, chosen)
        path.write_text(json.dumps(points))
    return [Point(*point) for point in json.loads(path.read_text())]


def main() -> None:
    """Print a table, and draw the curves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--top-p", type=float, default=0.8)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--rewards", nargs="+", choices=REWARDS, default=[*REWARDS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--folder", type=Path, default=Path("runs/truncated_sampling"))
    parser.add_argument("--out", type=Path, default=Path("truncated_sampling.png"))
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lrlhf"):
        logging.getLogger(name).setLevel(logging.ERROR)
    print("| reward | | score | entropy at the end | log-ratio before the first step |")  # noqa: T201
    print("|---|---|---|---|---|")  # noqa: T201
    curves: dict[str, dict[str, list[list[Point]]]] = {}
    for reward in chosen.rewards:
        curves[reward] = {}
        for form in FORMS:
            runs = [trained(form, reward, seed, chosen) for seed in chosen.seeds]
            curves[reward][form] = runs
            columns = (
                [_mean(points[-5:], "score") for points in runs],
                [_mean(points[-5:], "entropy") for points in runs],
                [_mean(points, "log_ratio") for points in runs],
            )
            cells = [f"{mean:.3f} ± {width:.3f}" for mean, width in map(interval, columns)]
            print(f"| {reward} | {form} | {' | '.join(cells)} |", flush=True)  # noqa: T201
    draw(curves, chosen.out)


def _mean(points: Sequence[Point], name: str) -> float:
    return sum(getattr(point, name) for point in points) / len(points)


def draw(curves: Mapping[str, Mapping[str, Sequence[Sequence[Point]]]], path: Path) -> None:
    """Draw a row of panels for each reward: the seeds thin, and their mean."""
    size = (11, 0.4 + 3.2 * len(curves))
    figure = importlib.import_module("matplotlib.figure").Figure(size, layout="constrained")
    titles = ("score", "entropy over all ids (nats)", "log-ratio before the first step")
    panels = iter(figure.subplots(len(curves), 3, squeeze=False).flat)
    for reward, forms in curves.items():
        for name, title in zip(Point._fields, titles, strict=True):
            panel = next(panels)
            for colour, (form, runs) in enumerate(forms.items()):
                values = torch.tensor([[getattr(each, name) for each in own] for own in runs])
                panel.plot(values.T, f"C{colour}", alpha=0.25, linewidth=0.8)
                panel.plot(values.mean(dim=0), f"C{colour}", label=form)
            panel.set(xlabel="iteration", title=f"{reward}: {title}")
            panel.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
