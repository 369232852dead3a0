"""Measures what PyTorch's allocator gives out during one step of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lrlhf.modules import DPO, PPO, RLOO
from lrlhf.rollout import RolloutListener


class MemoryProbe(L.Callback, RolloutListener):
    """Writes the most bytes that were in use in each phase of the second step.

    The second step is the first that finds optimizer states. What lies in memory before it is
    added up tensor by tensor; what comes and goes is told by the profiler, which hooks into the
    allocator, so that nothing of the code that predicts is involved.

    Args:
        path: File to write to.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._profile: profile | None = None
        self._phase = ""
        self._begun: list[tuple[int, str]] = []
        self._before = 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            self._before = _bytes_of(_resident(trainer, pl_module))
            self._begun = [(time.time_ns(), "step")]
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.__enter__()

    def on_phase(self, phase: str) -> None:
        if self._profile is not None:
            self._begun.append((time.time_ns(), phase))

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._profile is None:
            return
        self._profile.__exit__(None, None, None)
        Path(self._path).write_text(json.dumps(self._peaks(self._profile)))
        self._profile = None

    def _peaks(self, finished: profile) -> dict[str, int]:
        results = finished.profiler.kineto_results
        changes = sorted(
            (event.start_ns(), event.nbytes())
            for event in results.events()
            if event.name() == "[memory]"
        )
        peaks: dict[str, int] = {}
        now, phases = self._before, list(self._begun)
        phase = "step"
        for when, change in changes:
            while phases and phases[0][0] <= when:
                phase = phases.pop(0)[1]
            now += change
            for name in {phase, "step"}:
                peaks[name] = max(peaks.get(name, 0), now)
        return peaks


def _resident(trainer: L.Trainer, module: L.LightningModule) -> Iterable[Tensor]:
    models: list[nn.Module] = [module]
    if isinstance(module, RLOO | PPO) and module.reference is not None:
        models += [
            value for value in vars(module.reference).values() if isinstance(value, nn.Module)
        ]
    if isinstance(module, DPO) and module.reference is not None:
        models.append(module.reference.model)
    for model in models:
        yield from model.buffers()
        for weight in model.parameters():
            yield weight
            if weight.grad is not None:
                yield weight.grad
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def long_is_good(completions: list[str]) -> list[float]:
    """Scores that differ, so that there is something to learn."""
    return [float(len(text) + index) for index, text in enumerate(completions)]
