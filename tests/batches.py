"""Batches in parts."""

from typing import Any, TypeVar

from lrlhf.rollout import micro_batch_rows, trim
from lrlhf.types import SequenceBatch

BatchT = TypeVar("BatchT", bound=SequenceBatch)


def micro_batches(batch: BatchT, **limits: Any) -> list[BatchT]:
    """Rows of similar length together, without the padding that they have in common."""
    return [trim(batch.select(rows)) for rows in micro_batch_rows(batch.lengths, **limits)]
