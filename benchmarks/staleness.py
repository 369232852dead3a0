"""What bounded staleness costs in learning, and what it hides of generation.

A tiny policy with random weights learns to write letters: the reward is the share of letters in a
response of 8 bytes. Its engine is a copy of the policy that takes new weights between two tokens,
and sleeps as long for each token as an engine elsewhere would compute. Every staleness gets the
same iterations, learning rate and seeds. The score is that of 256 fresh responses of the policy
after the last iteration, with the 95 % interval of the mean over the seeds. *Hidden* is the share
of the time in which the engine generated, but training did not wait for it.

    python -m benchmarks.staleness [--staleness 0 1 2 4] [--iterations 80] [--seeds 1 2 3]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import math
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from scipy.stats import t as student

from lrlhf.callbacks import VLLMWeightSync
from lrlhf.datamodules import PromptDataModule
from lrlhf.modules import RLOO, OptimizerConfig, Reference
from lrlhf.rewards import Rewards
from lrlhf.rollout import RolloutListener, Sampling, TransformersEngine, response_ids
from lrlhf.rollout.responses import token_prompts
from lrlhf.types import Experience
from tests.conftest import build_language_model, build_tokenizer
from tests.modules.policy_runs import fit, letters
from tests.rollout.flight_engine import FlightEngine, Generated

PROMPTS = [f"say {letter}" for letter in "abcdefghijklmnop"]
TOKENS = 8
TOKENIZER = build_tokenizer()


class Result(NamedTuple):
    """What one run has shown."""

    score: float
    seconds: float
    """Per iteration."""
    hidden: float
    age: float
    """Mean over the tokens that were trained on."""
    mixed: float
    """Share of the responses with tokens of several versions."""


class Watch(RolloutListener, L.Callback):
    """Times the waiting for responses, and reads the versions of their tokens."""

    def __init__(self) -> None:
        self.waits: list[tuple[float, float]] = []
        """When training waited for responses: from, until."""
        self.ages: list[float] = []
        self.mixed: list[float] = []
        self._since: float | None = None

    def on_phase(self, phase: str) -> None:
        now = time.perf_counter()
        if self._since is not None:
            self.waits.append((self._since, now))
        self._since = now if phase == "generate" else None

    def on_rollout(
        self, trainer: L.Trainer, module: Any, experience: Experience, records: Sequence[Any]
    ) -> None:
        assert experience.versions is not None
        ages = (trainer.global_step - experience.versions)[experience.response_mask]
        self.ages.append(float(ages.double().mean()))
        self.mixed.append(sum("weight_versions" in one for one in records) / len(records))


def run(
    staleness: int, seed: int, *, iterations: int, lr: float, delay: float, **options: Any
) -> Result:
    """Train once, with further options of `RLOO`."""
    L.seed_everything(seed, verbose=False)
    engine, watch = FlightEngine(delay=delay, seed=seed), Watch()
    module = RLOO(
        build_language_model(TOKENIZER),
        Rewards([letters]),
        tokenizer=TOKENIZER,
        engine=engine,
        num_generations=8,
        sampling=Sampling(max_new_tokens=TOKENS),
        optimizer=OptimizerConfig(lr=lr),
        max_staleness=staleness,
        seed=seed,
        **({"reference": Reference(kl_coef=0.0)} | options),
    )
    rows = [{"prompt": text} for text in PROMPTS]
    started = time.perf_counter()
    fit_quietly(
        module,
        steps=iterations,
        callbacks=[VLLMWeightSync(probe_every=0), watch],
        data=PromptDataModule(rows, batch_size=8, seed=seed),
    )
    seconds = time.perf_counter() - started
    return Result(
        score=final_score(module, seed),
        seconds=seconds / iterations,
        hidden=hidden(engine.generated, watch.waits),
        age=sum(watch.ages) / iterations,
        mixed=sum(watch.mixed) / iterations,
    )


def hidden(generated: Sequence[Generated], waits: Sequence[tuple[float, float]]) -> float:
    """Return the share of the time of generation, of one batch or more, that nothing waited for."""
    total, waited, reached = 0.0, 0.0, -math.inf
    for one in sorted(generated):
        start, reached = max(one.started, reached), max(one.ended, reached)
        total += max(0.0, reached - start)
        waited += sum(max(0.0, min(reached, end) - max(start, begin)) for begin, end in waits)
    return 1 - waited / total


def final_score(module: RLOO, seed: int) -> float:
    """Return the mean reward of 16 responses to each prompt by the policy as it is."""
    scores = letters(fresh_responses(module, PROMPTS, seed))
    return sum(scores) / len(scores)


def fresh_responses(module: RLOO, texts: Sequence[str], seed: int) -> list[str]:
    """Return 16 responses to each prompt by the policy as it is."""
    engine = TransformersEngine()
    engine.attach(module.policy, TOKENIZER)
    prompts = token_prompts([TOKENIZER(text)["input_ids"] for text in texts])
    rollout = engine.generate(
        prompts,
        Sampling(max_new_tokens=TOKENS),
        num_generations=16,
        seeds=range(1000 * seed, 1000 * seed + 16 * len(texts)),
    )
    return [
        TOKENIZER.decode(ids, skip_special_tokens=True) for ids in response_ids(rollout, prompts)
    ]


def fit_quietly(module: L.LightningModule, *, steps: int, **options: Any) -> None:
    """Train in a folder that is thrown away, without the table of sizes that ``fit`` prints."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        fit(module, Path(folder), Path(folder), steps=steps, **options)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and half width of the 95 % interval of the mean."""
    scores = torch.tensor(values, dtype=torch.float64)
    if len(values) < 2:
        return float(scores.mean()), math.nan
    width = student.ppf(0.975, len(values) - 1) * scores.std() / math.sqrt(len(values))
    return float(scores.mean()), float(width)


def main() -> None:
    """Print a row for each staleness."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--iterations", type=int, default=80)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--delay", type=float, default=0.01, help="seconds per token")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lrlhf"):
        logging.getLogger(name).setLevel(logging.ERROR)
    head = "| staleness | score of each seed | mean | s per iteration | hidden | age | mixed |"
    print(f"{head}\n|---|---|---|---|---|---|---|")  # noqa: T201
    for staleness in asked.staleness:
        options = {"iterations": asked.iterations, "lr": asked.lr, "delay": asked.delay}
        runs = [run(staleness, seed, **options) for seed in asked.seeds]
        mean, width = interval([one.score for one in runs])
        scores = ", ".join(f"{one.score:.3f}" for one in runs)
        columns = Result(*(sum(column) / len(runs) for column in zip(*runs, strict=True)))
        print(  # noqa: T201
            f"| {staleness} | {scores} | {mean:.3f} ± {width:.3f} | {columns.seconds:.2f} | "
            f"{columns.hidden:.0%} | {columns.age:.2f} | {columns.mixed:.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
