"""What every part of one training step is handed: ranks, step, seeds, phases, metrics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import lightning as L
import torch

from lrlhf.models.token_budget import GIB, PEAK_MEMORY, peak_memory
from lrlhf.modules.base import TrainingModule
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.rollout import RolloutListener
from lrlhf.run import Collectives, seed_everything_for
from lrlhf.types import Experience

_BEFORE_UPDATE = 1
"""Place of the pass without gradients among the seeds of an iteration; optimizer steps follow. Not
0, which NumPy's seeds do not tell from nothing."""


class UpdateContext(NamedTuple):
    """What holds for all optimizer steps of one iteration."""

    kl_coef: float
    stored: bool
    """Whether an earlier run's policy generated the responses."""
    from_engine: bool
    """Whether old log-probabilities are the engine's, taken as they are."""
    exact: bool
    """Whether the engine's log-probabilities are the policy's own."""
    value_unit: float = 1.0
    """Standard deviation of the scores so far, as values are measured in it."""


class Iteration:
    """One training step of a policy, or one batch of an evaluation.

    Args:
        module: Takes the step; its trainer has the callbacks that listen.
        seeds: Of a step that is taken again, see `TrainingModule.seed_step`; None: of this one.
    """

    def __init__(self, module: TrainingModule, *, seeds: tuple[int, ...] | None = None) -> None:
        self.module = module
        self.trainer: L.Trainer = module.trainer
        self.device: torch.device = module.device
        self.step: int = module.global_step
        """Iterations before this one, of which its seeds are made."""
        self.ranks = Collectives(module.trainer)
        self.metrics = MetricSums()
        self._seeds = seeds
        self.optimizer_steps = 0 if seeds is None else max(0, seeds[-1] - _BEFORE_UPDATE - 1)
        """How many were begun so far, of whichever optimizer."""
        self._seconds: dict[str, float] = {}

    @property
    def number(self) -> int:
        """What a training step is called, see `lrlhf.run.seeding.running_step`."""
        return self.step + 1

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name and time what happens inside."""
        for listener in self._listeners():
            listener.on_phase(name)
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
        for listener in self._listeners():
            listener.on_phase("")

    def seed_before_update(self) -> tuple[int, ...]:
        """Seed the pass without gradients; returns what it was seeded with."""
        return self._seed(_BEFORE_UPDATE)

    def seed_optimizer_step(self) -> tuple[int, ...]:
        """Count and seed an optimizer step; returns what it was seeded with."""
        self.optimizer_steps += 1
        return self._seed(_BEFORE_UPDATE + self.optimizer_steps)

    def _seed(self, place: int) -> tuple[int, ...]:
        if self._seeds is None:
            return self.module.seed_step(place)
        seed_everything_for(*self._seeds)
        return self._seeds

    def request_weights(self) -> None:
        """Have the listeners bring the engine its weights."""
        with self.phase("sync"):
            for listener in self._listeners():
                listener.on_weights_needed(self.trainer, self.module)

    def show_rollout(self, experience: Experience, records: Sequence[dict[str, Any]]) -> None:
        """Show the listeners what is about to be trained on."""
        first = experience.response_mask.long().argmax(dim=1)
        advantages = experience.advantages.gather(1, first[:, None])[:, 0].tolist()
        for record, advantage in zip(records, advantages, strict=True):
            record["advantage"] = advantage
        for listener in self._listeners():
            listener.on_rollout(self.trainer, self.module, experience, records)

    def measure_costs(self, tokens: float) -> None:
        """Report seconds by phase, memory, and how many tokens of this rank went through."""
        self.metrics.maximum(PEAK_MEMORY, peak_memory(self.device) / GIB)
        for phase, seconds in self._seconds.items():
            self.metrics.maximum(f"perf/{phase}_s", seconds)
        busy = sum(self._seconds.values())
        if busy > 0:
            self.metrics.add("perf/tokens_per_s", tokens / busy, 1 / self.ranks.world_size)

    def _listeners(self) -> list[RolloutListener]:
        callbacks: list[L.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return [callback for callback in callbacks if isinstance(callback, RolloutListener)]
