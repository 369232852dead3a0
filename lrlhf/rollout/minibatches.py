"""How a batch of experience is cut into minibatches, and rows into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lrlhf.models.packed.packing import Tree, compact, find_trees, unfold
from lrlhf.types import SequenceBatch

Batch = TypeVar("Batch", bound=SequenceBatch)


def minibatches(batch: Batch, *, size: int | None) -> Iterator[Batch]:
    """Cut a batch at random (torch's global generator) into the parts of one optimizer step each.

    Rows of one group stay together where groups are of one size that divides ``size``: what they
    begin with is computed once.

    Args:
        batch: All rows of an iteration on this rank.
        size: Rows per part; must divide the number of rows. None: one part.

    Raises:
        ValueError: ``size`` does not divide the rows.
    """
    rows = len(batch)
    size = rows if size is None else size
    if size < 1 or rows % size != 0:
        raise ValueError(f"{rows} rows do not split into parts of {size}")
    order = _shuffled(batch, size) if size < rows else torch.arange(rows)
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


class MicroBatch(NamedTuple):
    """Rows that one forward pass is about."""

    rows: Tensor
    """`[N]`, their places in the batch."""
    computed: int
    """Tokens that go through the model: padding counts, what rows share counts once."""
    given: int
    """Tokens of the rows."""

    @property
    def padding(self) -> int:
        """Tokens that are computed for nothing."""
        return max(0, self.computed - self.given)

    @property
    def shared(self) -> int:
        """Tokens that need no computation, as another row of it begins with them too."""
        return max(0, self.given - self.computed)


def plan_micro_batches(
    batch: SequenceBatch,
    *,
    max_tokens: int | None,
    packed: bool,
    shared: bool = True,
    at_least: int = 1,
) -> list[MicroBatch]:
    """Cut a batch into micro-batches, the largest first.

    Args:
        batch: Rows of any length.
        max_tokens: Tokens of one micro-batch as they are computed; a single row may have more.
            None: all rows in one.
        packed: Whether the model lays rows one after another, see `lrlhf.models.allow_packing`.
            Else rows of similar length go together, and padding counts.
        shared: Whether it computes once what rows of a group begin with, where they are packed.
        at_least: Micro-batches to make, where there are as many rows; ranks that gather weights
            together need equally many.
    """
    if packed:
        return _packed(batch, batch.group_ids if shared else None, max_tokens, at_least)
    given = batch.lengths.cpu()
    lengths, chains = _written_out(batch, given)
    groups = micro_batch_rows(lengths, chains, max_tokens=max_tokens, at_least=at_least)
    return [
        MicroBatch(
            rows,
            int(chains[rows].sum()) * int(lengths[rows].max()),
            int(given[rows].sum()),
        )
        for rows in groups
    ]


def micro_batch_rows(
    lengths: Tensor,
    copies: Tensor | None = None,
    *,
    max_tokens: int | None,
    at_least: int = 1,
) -> list[Tensor]:
    """Group rows of similar length, longest first.

    Args:
        lengths: `[B]`, tokens of each row.
        copies: `[B]`, how many rows of that length each is computed as; None: one.
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
    counts = torch.ones_like(order) if copies is None else copies.cpu()[order]
    ends = counts.cumsum(dim=0)
    groups: list[Tensor] = []
    start = 0
    while start < len(ordered):
        end = len(ordered)
        if max_tokens is not None:
            rows = max_tokens // max(ordered[start], 1) + int(ends[start] - counts[start])
            end = max(start + 1, int(torch.searchsorted(ends, rows, right=True)))
        groups.append(order[start:end])
        start = end
    while len(groups) < min(at_least, len(ordered)):
        largest = max(range(len(groups)), key=lambda index: len(groups[index]))
        groups[largest : largest + 1] = groups[largest].tensor_split(2)
    return groups


def _written_out(batch: SequenceBatch, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the longest branch of each row, and how many it has, `[B]` each.

    Args:
        batch: The rows.
        lengths: `[B]`, their tokens, on the CPU.
    """
    if batch.forks is None:
        return lengths, torch.ones_like(lengths)
    parts = (batch.input_ids.cpu(), batch.attention_mask.cpu(), batch.forks.cpu())
    chains = unfold(compact(*parts))
    branches = chains.rows.attention_mask.sum(dim=1)
    longest = torch.zeros_like(lengths).scatter_reduce(0, chains.owners, branches, "amax")
    return longest, torch.bincount(chains.owners, minlength=len(batch))


def _packed(
    batch: SequenceBatch, groups: Tensor | None, max_tokens: int | None, at_least: int
) -> list[MicroBatch]:
    if not len(batch):
        return []
    forks = None if batch.forks is None else batch.forks.cpu()
    rows = compact(batch.input_ids.cpu(), batch.attention_mask.cpu(), forks)
    trees = find_trees(rows, groups, batch.media)
    parts = [part for tree in trees for part in _within(tree, max_tokens)]
    bins = _fill(parts, max_tokens)
    while len(bins) < min(at_least, len(batch)):
        largest = max(
            range(len(bins)), key=lambda place: sum(len(part.rows) for part in bins[place])
        )
        bins[largest : largest + 1] = _halved(bins[largest])
    bins.sort(key=_tokens, reverse=True)
    lengths = rows.attention_mask.sum(dim=1)
    chosen = [torch.tensor([row for part in parts for row in part.rows]) for parts in bins]
    return [
        MicroBatch(places, _tokens(parts), int(lengths[places].sum()))
        for places, parts in zip(chosen, bins, strict=True)
    ]


def _within(tree: Tree, max_tokens: int | None) -> list[Tree]:
    """Cut a tree into parts that fit, each with the prefix of its own."""
    if max_tokens is None or tree.tokens <= max_tokens or len(tree.rows) == 1:
        return [tree]
    starts, tokens = [0], tree.prefix
    for place, branch in enumerate(tree.branches):
        if tokens + branch > max_tokens and place > starts[-1]:
            starts.append(place)
            tokens = tree.prefix
        tokens += branch
    ends = [*starts[1:], len(tree.rows)]
    return [_part(tree, start, end) for start, end in zip(starts, ends, strict=True)]


def _part(tree: Tree, start: int, end: int) -> Tree:
    return Tree(tree.rows[start:end], tree.prefix, tree.branches[start:end])


def _fill(parts: Sequence[Tree], max_tokens: int | None) -> list[list[Tree]]:
    """Put each part, largest first, where there is room for it (first fit decreasing)."""
    if max_tokens is None:
        return [list(parts)]
    bins: list[list[Tree]] = []
    room: list[int] = []
    for part in sorted(parts, key=lambda one: -one.tokens):
        place = next((i for i, free in enumerate(room) if part.tokens <= free), None)
        if place is None:
            bins.append([part])
            room.append(max_tokens - part.tokens)
        else:
            bins[place].append(part)
            room[place] -= part.tokens
    return bins


def _halved(parts: list[Tree]) -> tuple[list[Tree], list[Tree]]:
    """Split rows in two, within a tree only where it is the only one."""
    if len(parts) > 1:
        middle = len(parts) // 2
        return parts[:middle], parts[middle:]
    (tree,) = parts
    middle = len(tree.rows) // 2
    return [_part(tree, 0, middle)], [_part(tree, middle, len(tree.rows))]


def _tokens(parts: Sequence[Tree]) -> int:
    return sum(part.tokens for part in parts)
