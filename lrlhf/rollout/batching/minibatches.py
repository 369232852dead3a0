"""How a batch of experience is cut into minibatches, and rows into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

from lrlhf.types import SequenceBatch

Batch = TypeVar("Batch", bound=SequenceBatch)


def minibatches(batch: Batch, *, size: int | None, shuffle: bool = True) -> Iterator[Batch]:
    """Cut a batch into the parts of one optimizer step each.

    Rows of one group stay together where groups are of one size that divides ``size``: what they
    begin with is computed once.

    Args:
        batch: All rows of an iteration on this rank.
        size: Rows per part; must divide the number of rows. None: one part.
        shuffle: Choose the parts at random (torch's global generator) rather than in order.

    Raises:
        ValueError: ``size`` does not divide the rows.
    """
    rows = len(batch)
    size = rows if size is None else size
    if size < 1 or rows % size != 0:
        raise ValueError(f"{rows} rows do not split into parts of {size}")
    order = _shuffled(batch, size) if shuffle and size < rows else torch.arange(rows)
    for start in range(0, rows, size):
        yield batch.select(order[start : start + size])


def _shuffled(batch: SequenceBatch, size: int) -> Tensor:
    if batch.group_ids is None:
        return torch.randperm(len(batch))
    by_group = torch.argsort(batch.group_ids.cpu(), stable=True)
    counts = torch.unique(batch.group_ids, return_counts=True)[1].cpu()
    count = int(counts[0])
    if (counts != count).any() or size % count:
        return torch.randperm(len(batch))
    return by_group.view(-1, count)[torch.randperm(len(counts))].flatten()


def micro_batch_rows(lengths: Tensor, *, max_tokens: int | None, at_least: int = 1) -> list[Tensor]:
    """Group rows of similar length, longest first.

    Args:
        lengths: `[B]`, tokens of each row.
        max_tokens: Rows times longest row of one group, padding counted; a single row may be
            longer. None: one group.
        at_least: Groups to make, where there are as many rows; ranks that gather weights together
            need equally many.

    Returns:
        Row indices of each group.
    """
    # longest first: what does not fit in memory fails at once, not in the middle of a run
    order = torch.argsort(lengths, descending=True, stable=True).cpu()
    ordered = lengths.cpu()[order].tolist()
    groups: list[Tensor] = []
    start = 0
    while start < len(ordered):
        rows = len(ordered) if max_tokens is None else max(1, max_tokens // max(ordered[start], 1))
        groups.append(order[start : start + rows])
        start += rows
    while len(groups) < min(at_least, len(ordered)):
        largest = max(range(len(groups)), key=lambda index: len(groups[index]))
        groups[largest : largest + 1] = groups[largest].tensor_split(2)
    return groups


def trim(batch: Batch) -> Batch:
    """Drop the columns that are padding in every row."""
    longest = max(1, int(batch.lengths.max()))
    width = batch.input_ids.shape[1]
    if longest == width:
        return batch

    def cut(tensor: Tensor) -> Tensor:
        per_token = tensor.dim() > 1 and tensor.shape[1] == width
        return tensor[:, :longest] if per_token else tensor

    return batch.map(cut)  # media have columns of their own
