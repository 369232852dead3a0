"""``lrlhf export``: the model of a checkpoint, as others load it."""

from __future__ import annotations

from pathlib import Path

import lightning as L

from lrlhf.callbacks.ema import trainable_weights
from lrlhf.cli.checkpoint_weights import fill
from lrlhf.modules.contracts import Exportable
from lrlhf.run.atomic import atomic_folder


def export_checkpoint(
    module: L.LightningModule, checkpoint: Path, folder: Path, *, use_ema: bool = False
) -> None:
    """Fill a module from a checkpoint of any strategy, and write its model into a new folder.

    With ``use_ema`` it has the averaged weights of the `EMA` callback.

    Raises:
        CheckpointMismatchError: The checkpoint is that of another model.
        FileExistsError: The folder exists.
        NotACheckpointError: The checkpoint is damaged, or none.
        ValueError: The module cannot be exported, or the checkpoint has no averaged weights.
    """
    if not isinstance(module, Exportable):
        raise ValueError(f"{type(module).__name__} has no export_pretrained()")
    if folder.exists():
        raise FileExistsError(f"{folder} exists; choose another name, or remove it")
    fill(module, checkpoint, averaged=trainable_weights(module) if use_ema else None)
    with atomic_folder(folder) as fresh:
        module.export_pretrained(fresh)
