"""The validation sets of a run, as its modules and callbacks see them."""

from __future__ import annotations

import lightning as L

from lrlhf.datamodules import RowDataModule


def set_names(trainer: L.Trainer) -> tuple[str, ...]:
    """Return the name of each validation loader; empty: it has none.

    Data modules of this library name their sets where ``val`` is a mapping.
    """
    data = getattr(trainer, "datamodule", None)
    if isinstance(data, RowDataModule):
        return data.val_names
    of_stage = (trainer.num_val_batches, trainer.num_test_batches, trainer.num_sanity_val_batches)
    return ("",) * max(1, *map(len, of_stage))
