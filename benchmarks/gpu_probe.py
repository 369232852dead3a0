"""What runs of `gpu_run.py` load: a reward that costs nothing, and the speed of a reward model."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch

from lrlhf.models.flops import peak_flops, size_of


def first_token(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Half of the vocabulary's first tokens are good ones: scores differ within every group."""
    return [float(ids[0] % 2) for ids in completion_ids]


class PairSpeed(L.Callback):
    """Logs tokens per second and MFU of a reward model's steps, as policies do by themselves."""

    _start: float

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._start = _now()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        seconds = _now() - self._start
        lengths = torch.cat([batch.candidate0.lengths, batch.candidate1.lengths]).double()
        tokens, pairs = float(lengths.sum()), float(lengths.square().sum())
        pl_module.log("perf/update_tokens_per_s", tokens / seconds, batch_size=1)
        if (peak := peak_flops(pl_module.device)) is not None:
            size = size_of(pl_module.network, pl_module.network.scorer.plain)
            flops = (1 + size.backward_passes) * size.forward_flops(tokens, pairs)
            pl_module.log("perf/mfu", flops / seconds / peak, batch_size=1)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
