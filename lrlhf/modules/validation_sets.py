"""The data of a run, its validation sets and sources, as modules and callbacks see them."""

from __future__ import annotations

from typing import Any

import lightning as L

from lrlhf.datamodules.core import RowDataModule
from lrlhf.run.lightning_internals import data_in_use


def set_names(trainer: L.Trainer) -> tuple[str, ...]:
    """Return the name of each validation loader; empty: it has none.

    Data modules of this library name their sets where ``val`` is a mapping.
    """
    data = data_in_use(trainer)
    if isinstance(data, RowDataModule):
        return data.val_names
    of_stages = (
        *(trainer.num_val_batches, trainer.num_sanity_val_batches),
        *(trainer.num_test_batches, trainer.num_predict_batches),
    )
    return ("",) * max(1, *map(len, of_stages))


def set_column(trainer: L.Trainer, index: int, loaders: int) -> dict[str, Any]:
    """Return the column that tells the rows of several sets apart in files; of a single one: none.

    Args:
        trainer: Evaluates or predicts.
        index: Of the loader that a row comes from.
        loaders: How many there are.
    """
    if name := set_names(trainer)[index]:
        return {"set": name}
    return {"dataloader": index} if loaders > 1 else {}
