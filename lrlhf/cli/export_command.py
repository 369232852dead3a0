"""``lrlhf export``: the model of a checkpoint, as others load it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lrlhf.callbacks import EMA
from lrlhf.callbacks.ema import trainable_weights
from lrlhf.models.sharding import check_same_names, load_state
from lrlhf.modules.contracts import Exportable
from lrlhf.run.atomic import atomic_folder
from lrlhf.run.checkpoints.checkpoint_reader import read_checkpoint
from lrlhf.run.checkpoints.checkpoint_search import check


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
    check(checkpoint)
    stored = read_checkpoint(checkpoint)
    load_state(module, stored["state_dict"])
    if use_ema:
        averages, weights = _averages(stored, checkpoint), trainable_weights(module)
        check_same_names("the checkpoint's average", averages, weights)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(averages[name])
    with atomic_folder(folder) as fresh:
        module.export_pretrained(fresh)


def _averages(stored: Mapping[str, Any], checkpoint: Path) -> Mapping[str, Tensor]:
    if "callbacks" not in stored:
        raise ValueError(
            f"{checkpoint} holds weights only (save_weights_only), no averages; leave out --use_ema"
        )
    for key, state in stored["callbacks"].items():
        if key.split("{")[0] == EMA.__qualname__:
            shadows: Mapping[str, Tensor] = state["shadows"]
            return shadows
    raise ValueError(
        f"{checkpoint} has no averaged weights: the run had no EMA callback; leave out --use_ema"
    )
