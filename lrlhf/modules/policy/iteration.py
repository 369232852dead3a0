"""The phases of an iteration, and who is told of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L

from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.rollout import RolloutListener
from lrlhf.types import Experience


class Iteration:
    """Times the phases of the iterations of one module, and tells the listening callbacks.

    Args:
        module: Its trainer has the callbacks.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self._seconds: dict[str, float] = {}

    def begin(self) -> None:
        """Forget the times of the iteration before."""
        self._seconds = {}

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

    def tell_weights_needed(self) -> None:
        """Have the listeners bring the engine its weights."""
        with self.phase("sync"):
            for listener in self._listeners():
                listener.on_weights_needed(self._module.trainer, self._module)

    def tell_rollout(self, experience: Experience, records: Sequence[dict[str, Any]]) -> None:
        """Show the listeners what is about to be trained on."""
        first = experience.response_mask.long().argmax(dim=1)
        advantages = experience.advantages.gather(1, first[:, None])[:, 0].tolist()
        for record, advantage in zip(records, advantages, strict=True):
            record["advantage"] = advantage
        for listener in self._listeners():
            listener.on_rollout(self._module.trainer, self._module, experience, records)

    def measure(self, metrics: MetricSums, *, tokens: float, world_size: int) -> None:
        """Add up the times of the phases, and how many tokens went through per second."""
        for phase, seconds in self._seconds.items():
            metrics.maximum(f"perf/{phase}_s", seconds)
        busy = sum(self._seconds.values())
        if busy > 0:
            metrics.add("perf/tokens_per_s", tokens / busy, 1 / world_size)

    def _listeners(self) -> list[RolloutListener]:
        callbacks: list[L.Callback] = self._module.trainer.callbacks  # type: ignore[attr-defined]
        return [callback for callback in callbacks if isinstance(callback, RolloutListener)]
