"""How checkpoints reach the disk where one process writes them, and how any kind is read there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lrlhf.run.atomic import atomic_write, check_room
from lrlhf.run.checkpoints.checkpoint_reader import explained, read_folder
from lrlhf.run.checkpoints.checkpoint_search import check


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target, brings it to the disk, then renames it.

    Lightning's own builds the file in memory and in the system's temporary folder first, from where
    a move to another disk is no single step: a kill leaves half a checkpoint. Paths with a protocol
    (``s3://…``) go Lightning's way. Folders of sharded strategies are read too, so that a run which
    was split goes on in one process, and what is read is compared with its checksums.
    """

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        if storage_options is not None or "://" in os.fspath(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        check_room(Path(path), checkpoint)
        with atomic_write(Path(path)) as handle:
            torch.save(checkpoint, handle)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        local = "://" not in os.fspath(path)
        if local and os.path.lexists(path):
            check(Path(path))
        if local and Path(path).is_dir():
            return read_folder(Path(path), lazy=False)
        # not to run code that comes with a file is the default here, whatever Lightning's is
        there = local and Path(path).exists()
        with explained(Path(path)) if there else contextlib.nullcontext():
            return super().load_checkpoint(path, map_location, weights_only is not False)


def use_atomic_checkpoints(trainer: L.Trainer) -> None:
    """Have checkpoints written and read by `AtomicCheckpointIO`, unless another way was chosen."""
    strategy = trainer.strategy
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = AtomicCheckpointIO()
