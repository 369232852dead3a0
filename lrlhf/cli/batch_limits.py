"""Options of the trainer that mean a number of batches if they are whole, and else a share."""

from __future__ import annotations

import lightning as L

LIMITS = tuple(f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict"))


def read_whole_numbers_as_such() -> None:
    """Have jsonargparse read ``limit_val_batches: 1`` as 1, one batch, and not as 1.0, all of them.

    It takes the first type that fits, and which one that is depends on what was imported before:
    to typing, ``Optional[Union[int, float]]`` and ``Optional[Union[float, int]]`` are one object.
    """
    for name in LIMITS:
        L.Trainer.__init__.__annotations__[name] = int | float | None
