"""Division of a batch of experience into minibatches, and of rows into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lrlhf.models.packed.packing import Tree, compact, find_trees, unfold
from lrlhf.types import Rollout, SequenceBatch

Batch = TypeVar("Batch", bound=SequenceBatch)


def minibatches(batch: Batch, *, size: int | None) -> Iterator[Batch]:
    """Divide a batch at random (torch's global generator) into one minibatch per optimizer step.

    Rows of one group stay together where all groups have one size that divides ``size``, so that
    their common prefix is computed once.

    Args:
        batch: All rows of an iteration on this rank.
        size: Rows per minibatch; must divide the number of rows. None: one minibatch.

    Raises:
        ValueError: ``size`` does not divide the rows.
    """
    rows = len(batch)
    size = rows if size is None else size
    if size < 1 or rows % size != 0:
        raise ValueError(f"{rows} rows do not split into parts of {size}")
    order = torch.arange(rows)
    if size < rows:
        groups = _equal_groups(batch, size)
        units = order[:, None] if groups is None else groups
        order = units[torch.randperm(len(units))].flatten()
    for start in range(0, rows, size):
        yield batch.select(order[start : start + size])


def _equal_groups(batch: SequenceBatch, size: int) -> Tensor | None:
    """Return `[G, N]`, the rows of each group, where N is one number that divides ``size``."""
    if batch.group_ids is None:
        return None
    counts = torch.unique(batch.group_ids, return_counts=True)[1].cpu()
    count = int(counts[0])
    if (counts != count).any() or size % count:
        return None
    return torch.argsort(batch.group_ids.cpu(), stable=True).view(-1, count)


def trim(batch: Batch) -> Batch:
    """Drop the columns that are padding in every row."""
    if isinstance(batch, Rollout) and batch.privileged is not None:  # of another width
        privileged = trim(batch.privileged)
        return replace(trim(replace(batch, privileged=None)), privileged=privileged)
    longest = max(1, int(batch.lengths.max()))
    width = batch.input_ids.shape[1]
    if longest == width:
        return batch

    def cut(tensor: Tensor) -> Tensor:
        per_token = tensor.dim() > 1 and tensor.shape[1] == width
        return tensor[:, :longest] if per_token else tensor

    return batch.map(cut)  # media have columns of their own


class MicroBatch(NamedTuple):
    """Rows of one forward pass."""

    rows: Tensor
    """`[N]`, indices in the batch."""
    computed: int
    """Tokens that go through the model: padding counts, shared prefixes count once."""
    tokens: int
    """Tokens of the rows."""

    @property
    def padding(self) -> int:
        """Computed tokens that are padding."""
        return max(0, self.computed - self.tokens)

    @property
    def shared(self) -> int:
        """Tokens of a prefix that is computed for another row."""
        return max(0, self.tokens - self.computed)


def plan_micro_batches(
    batch: SequenceBatch,
    *,
    max_tokens: int | None,
    packed: bool,
    shared: bool = True,
    at_least: int = 1,
    placeholders: Mapping[str, int] = MappingProxyType({}),
) -> list[MicroBatch]:
    """Divide a batch into micro-batches, the largest first.

    Args:
        batch: Rows of any length.
        max_tokens: Computed tokens of one micro-batch; a single row may have more. None: all rows
            in one.
        packed: Whether rows are packed into one sequence, see `lrlhf.models.allow_packing`. Else
            rows of similar length go together, and padding counts.
        shared: Whether the common prefix of a group is computed once, where rows are packed.
        at_least: Lower bound of micro-batches, if there are as many rows; ranks that gather
            weights together need equally many.
        placeholders: The model's, see `find_trees`; without, rows that show several images share
            nothing.
    """
    if packed:
        groups = batch.group_ids if shared else None
        return _packed(batch, groups, max_tokens, at_least, placeholders)
    row_lengths = batch.lengths.cpu()
    lengths, branches = _branches(batch, row_lengths)
    return [
        MicroBatch(
            rows, int(branches[rows].sum()) * int(lengths[rows].max()), int(row_lengths[rows].sum())
        )
        for rows in micro_batch_rows(lengths, branches, max_tokens=max_tokens, at_least=at_least)
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
        copies: `[B]`, number of rows of that length that each is computed as; None: one.
        max_tokens: Rows times longest row of one group, padding counted; a single row may be
            longer. None: one group.
        at_least: See `plan_micro_batches`.

    Returns:
        Row indices of each group.
    """
    # longest first, so that a batch that does not fit in memory fails at once
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


def _branches(batch: SequenceBatch, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return length of the longest branch and number of branches of each row, `[B]` each."""
    if batch.forks is None:
        return lengths, torch.ones_like(lengths)
    chains = unfold(compact(batch.input_ids.cpu(), batch.attention_mask.cpu(), batch.forks.cpu()))
    branches = chains.rows.attention_mask.sum(dim=1)
    longest = torch.zeros_like(lengths).scatter_reduce(0, chains.owners, branches, "amax")
    return longest, torch.bincount(chains.owners, minlength=len(batch))


def _packed(
    batch: SequenceBatch,
    groups: Tensor | None,
    max_tokens: int | None,
    at_least: int,
    placeholders: Mapping[str, int],
) -> list[MicroBatch]:
    if not len(batch):
        return []
    forks = None if batch.forks is None else batch.forks.cpu()
    experts = None if batch.routed_experts is None else batch.routed_experts.cpu()
    rows = compact(batch.input_ids.cpu(), batch.attention_mask.cpu(), forks, experts)
    trees = [
        part
        for tree in find_trees(rows, groups, batch.media, placeholders)
        for part in _within_budget(tree, max_tokens)
    ]
    bins = [trees] if max_tokens is None else _first_fit(trees, max_tokens)
    while len(bins) < min(at_least, len(batch)):
        largest = max(
            range(len(bins)), key=lambda index: sum(len(tree.rows) for tree in bins[index])
        )
        trees = bins[largest]
        if len(trees) == 1:
            middle = len(trees[0].rows) // 2
            bins[largest : largest + 1] = [
                [_slice(trees[0], 0, middle)],
                [_slice(trees[0], middle, len(trees[0].rows))],
            ]
        else:
            middle = len(trees) // 2
            bins[largest : largest + 1] = [trees[:middle], trees[middle:]]
    bins.sort(key=_tokens, reverse=True)
    lengths = rows.attention_mask.sum(dim=1)
    indices = [torch.tensor([row for tree in trees for row in tree.rows]) for trees in bins]
    return [
        MicroBatch(own, _tokens(trees), int(lengths[own].sum()))
        for own, trees in zip(indices, bins, strict=True)
    ]


def _within_budget(tree: Tree, max_tokens: int | None) -> list[Tree]:
    """Divide a tree into parts that fit, each with the prefix."""
    if max_tokens is None or tree.tokens <= max_tokens or len(tree.rows) == 1:
        return [tree]
    starts, tokens = [0], tree.prefix
    for index, branch in enumerate(tree.branches):
        if tokens + branch > max_tokens and index > starts[-1]:
            starts.append(index)
            tokens = tree.prefix
        tokens += branch
    ends = [*starts[1:], len(tree.rows)]
    return [_slice(tree, start, end) for start, end in zip(starts, ends, strict=True)]


def _slice(tree: Tree, start: int, end: int) -> Tree:
    return Tree(tree.rows[start:end], tree.prefix, tree.branches[start:end])


def _first_fit(trees: Sequence[Tree], max_tokens: int) -> list[list[Tree]]:
    """Put each tree, largest first, into the first bin with room (first fit decreasing)."""
    bins: list[list[Tree]] = []
    room: list[int] = []
    for tree in sorted(trees, key=lambda each: -each.tokens):
        index = next((i for i, free in enumerate(room) if tree.tokens <= free), len(bins))
        if index == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[index].append(tree)
        room[index] -= tree.tokens
    return bins


def _tokens(trees: Sequence[Tree]) -> int:
    return sum(tree.tokens for tree in trees)
