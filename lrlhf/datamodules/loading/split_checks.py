"""What is said of splits, and what must hold for them on every rank."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from lrlhf.datamodules.loading.data_fingerprint import fingerprint
from lrlhf.datamodules.loading.sources import Entries, Source, entries_of
from lrlhf.datamodules.loading.splits import Split, Splits
from lrlhf.datamodules.rows.bad_rows import BadDataError
from lrlhf.run.collectives import Collectives
from lrlhf.secrets import hide

_MOST_NAMED = 3


def described(entries: Entries, split: Split[Any] | None) -> str:
    """Name some sources, with rows and columns once these are known."""
    sources = [entry.source for entry in entries_of(entries, "data")]
    named = [
        source.name if isinstance(source, Source) and split is not None else str(source)
        for source in sources[:_MOST_NAMED]
    ]
    more = len(sources) - _MOST_NAMED
    listed = hide(", ".join(named)) + (f" and {more} more" if more > 0 else "")
    if split is None:
        return listed
    return f"{len(split.rows):,} rows from {listed}; columns: {', '.join(split.columns) or 'none'}"


def refuse_other_rows(trainer: L.Trainer | None, splits: Splits[Any], *, dated: bool) -> None:
    """Stop every rank where one has made other rows: batches would overlap, and rows be left out.

    Raises:
        BadDataError: A rank has other rows, or another order of them.
    """
    if trainer is None or trainer.world_size == 1 or not torch.distributed.is_initialized():
        return
    train, held = splits
    parts = (train, *held.values())
    own = [fingerprint(split.values, read_files=False) for split in parts]
    # today's date may be in the tokens, and midnight fall between two ranks
    digests = Collectives(trainer).gather([(one.data, not dated and one.tokens) for one in own])
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise BadDataError(
            f"rank {', '.join(map(str, others))} has other rows than rank 0, or another order of "
            "them: every process must make the same (seed what is drawn, sort what comes from a "
            "set or a folder)"
        )
