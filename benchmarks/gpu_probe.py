"""What a run of `gpu.py` loads: a reward that costs nothing, and a callback that notes memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch


def first_token(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Half of the vocabulary's first tokens are good ones: scores differ within every group."""
    return [float(ids[0] % 2) for ids in completion_ids]


class PeakMemory(L.Callback):
    """Writes the most that tensors took on this GPU, and the weights that learn, at the end.

    Args:
        path: JSON file.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        self._path.write_text(json.dumps({"peak_bytes": peak}))
