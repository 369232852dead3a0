"""Rows laid one after another without padding, what several of them begin with only once.

The responses to one prompt, or the two answers of a pair, are a tree: the tokens that all of them
begin with, then a branch for each. A causal model computes the same hidden states for those tokens
in every row, so once is enough.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lrlhf.types import Media


class Compacted(NamedTuple):
    """Rows whose attended tokens come first, in order, with nothing between them."""

    input_ids: Int[Tensor, "B T"]
    attention_mask: Bool[Tensor, "B T"]
    order: Int[Tensor, "B T"]
    """Column in the original row of every column here."""


def compact(input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"]) -> Compacted:
    """Move the attended tokens of every row to its start, in order.

    Right-padded rows stay as they are. After it every model family numbers positions rightly by
    itself, whether the padding was at the left, at the right or in the middle.
    """
    order = torch.argsort((~attention_mask).to(torch.uint8), dim=1, stable=True)
    return Compacted(input_ids.gather(1, order), attention_mask.gather(1, order), order)


@dataclass(frozen=True)
class Tree:
    """Rows that begin with the same tokens."""

    rows: tuple[int, ...]
    """Longest first."""
    prefix: int
    """Tokens that all rows begin with; of a single row all of them."""
    branches: tuple[int, ...]
    """Tokens of each row behind them, in the order of ``rows``."""

    @property
    def tokens(self) -> int:
        """Tokens to compute."""
        return self.prefix + sum(self.branches)


@dataclass(frozen=True)
class Run:
    """Consecutive segments of nearly equal length, whose attention is computed together."""

    start: int
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all segments."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest segment."""
        return max(self.lengths)


class BranchRun(NamedTuple):
    """Branches of one tree."""

    branches: Run
    prefix_start: int
    prefix: int


class BranchTable(NamedTuple):
    """Places of the tokens of branches of similar length, and of the prefixes that they follow."""

    prefixes: Int[Tensor, "R P"]
    prefix_lengths: Int[Tensor, " R"]
    branches: Int[Tensor, "R L"]


class SegmentTable(NamedTuple):
    """Places of the tokens of all segments, those behind a segment's end filled with its first."""

    prefixes: tuple[Int[Tensor, "S P"], ...]
    """Of similar length in each part."""
    branches: tuple[BranchTable, ...]
    back: Int[Tensor, " N"]
    """Where each packed token is among the flattened parts, prefixes first."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Where the segments lie in a packed row: all prefixes, then all branches, tree by tree.

    Attention functions read it. It is no tensor, so nothing casts, splits or copies it.
    """

    prefixes: tuple[Run, ...]
    branches: tuple[BranchRun, ...]
    table: SegmentTable | None
    """For devices on which few large operations are faster than many small ones."""
    masks: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """Made by the first layer that needs them, read by the others."""
    windows: list[int | None] = field(default_factory=list)
    """How far each layer said that it sees, as it was computed."""


@dataclass(frozen=True, eq=False)
class Packed:
    """The rows of a batch as one row."""

    trees: tuple[Tree, ...]
    source: Int[Tensor, " N"]
    """Of every packed token, its place in the flattened rows ``[B * T]``."""
    index: Int[Tensor, "B T"]
    """Of every token of the rows, its place in the packed row; 0 behind a row's end."""
    segments: Segments

    @property
    def tokens(self) -> int:
        """Tokens to compute."""
        return len(self.source)


RUN_BY_RUN = ("cpu",)
"""Devices on which the attention of each run is computed by itself, without needless padding."""

_SPREAD = 1.5
"""On the others: of segments that are computed together the longest is less than so much longer
than the shortest."""

SIMILAR = 0.8
"""Segments at least this share of the longest are computed together, filled up to its length."""


_known: ContextVar[Sequence[Tree] | None] = ContextVar("known_trees", default=None)


@contextlib.contextmanager
def known_trees(trees: Sequence[Tree]) -> Iterator[None]:
    """Pack the batches of the block so, whatever their tokens are: shapes alone have none."""
    token = _known.set(trees)
    try:
        yield
    finally:
        _known.reset(token)


def find_trees(
    rows: Compacted,
    groups: Int[Tensor, " B"] | None,
    media: Sequence[Media | None] | None = None,
    placeholders: Sequence[int] = (),
) -> list[Tree]:
    """Find what rows have in common.

    Args:
        rows: The rows.
        groups: Rows with equal numbers may share what they begin with; None: none does.
        media: Of each row; only rows that show the same object share anything.
        placeholders: Token ids that stand for media. A tree's media are given to the model once,
            so all of a row's placeholders lie in what is shared, or nothing is.

    Returns:
        Trees that hold every row once, the longest prefix first.
    """
    known = _known.get()
    if known is not None:
        return list(known)
    ids, mask = rows.input_ids.cpu(), rows.attention_mask.cpu()
    lengths = mask.sum(dim=1).tolist()
    numbers = list(range(len(lengths))) if groups is None else groups.tolist()
    shown = [None] * len(lengths) if media is None else [id(entry) for entry in media]
    members: dict[tuple[int, int | None], list[int]] = {}
    for row, key in enumerate(zip(numbers, shown, strict=True)):
        members.setdefault(key, []).append(row)
    marked = torch.tensor(list(placeholders), dtype=ids.dtype)
    trees: list[Tree] = []
    for group in members.values():
        prefix = _common(ids, mask, group)
        marks = torch.isin(ids[group], marked) & mask[group]
        if prefix > 0 and not marks[:, prefix:].any():
            trees.append(_tree(group, prefix, lengths))
        else:
            trees += [_tree([row], lengths[row], lengths) for row in group]
    return sorted(trees, key=lambda tree: -tree.prefix)


def _common(ids: Tensor, mask: Tensor, group: Sequence[int]) -> int:
    """Count the tokens that all rows of a group begin with."""
    if len(group) == 1:
        return int(mask[group[0]].sum())
    same = (ids[group] == ids[group[0]]) & mask[group]
    return int(same.all(dim=0).long().cumprod(dim=0).sum())


def _tree(rows: Sequence[int], prefix: int, lengths: Sequence[int]) -> Tree:
    ordered = sorted(rows, key=lambda row: -lengths[row])
    branches = tuple(lengths[row] - prefix for row in ordered) if len(rows) > 1 else ()
    return Tree(tuple(ordered), prefix, branches)


def pack(rows: Compacted, trees: Sequence[Tree]) -> Packed:
    """Lay trees one after another.

    Args:
        rows: The rows.
        trees: Of `find_trees`.
    """
    width = rows.input_ids.shape[1]
    source: list[Tensor] = []
    index = torch.zeros(rows.input_ids.shape, dtype=torch.long)
    columns = torch.arange(width)
    start = 0
    for tree in trees:
        source.append(tree.rows[0] * width + columns[: tree.prefix])
        index[list(tree.rows), : tree.prefix] = start + columns[: tree.prefix]
        start += tree.prefix
    for tree in trees:
        for row, length in zip(tree.rows, tree.branches, strict=False):
            own = columns[tree.prefix : tree.prefix + length]
            source.append(row * width + own)
            index[row, tree.prefix : tree.prefix + length] = start + columns[:length]
            start += length
    device = rows.input_ids.device
    return Packed(
        trees=tuple(trees),
        source=torch.cat(source).to(device),
        index=index.to(device),
        segments=_segments(trees, device),
    )


def _segments(trees: Sequence[Tree], device: torch.device) -> Segments:
    prefixes = _runs(0, [tree.prefix for tree in trees])
    branches: list[BranchRun] = []
    starts = list(accumulate((tree.prefix for tree in trees), initial=0))
    start = starts[-1]
    for tree, prefix_start in zip(trees, starts, strict=False):
        branches += [
            BranchRun(run, prefix_start, tree.prefix) for run in _runs(start, tree.branches)
        ]
        start += sum(tree.branches)
    small = device.type in RUN_BY_RUN or not any(tree.tokens for tree in trees)
    table = None if small else _table(trees, starts, device)
    return Segments(tuple(prefixes), tuple(branches), table)


def _table(trees: Sequence[Tree], starts: Sequence[int], device: torch.device) -> SegmentTable:
    prefixes = [
        (start, tree.prefix) for start, tree in zip(starts, trees, strict=False) if tree.prefix
    ]
    branches, start = [], starts[-1]
    for tree, of_prefix in zip(trees, starts, strict=False):
        for length in tree.branches:
            if length:
                branches.append((start, length, of_prefix, tree.prefix))
            start += length
    whole = [_columns(part) for part in _alike(prefixes, 1)]
    parts = [_branch_table(part) for part in _alike(branches, 1, 3)]
    # the first place that a token has among the flattened parts is its own
    flat = torch.cat(
        [*(one.flatten() for one in whole), *(one.branches.flatten() for one in parts)]
    )
    back = torch.full((start,), len(flat)).scatter_reduce(
        0, flat, torch.arange(len(flat)), reduce="amin"
    )
    return SegmentTable(
        prefixes=tuple(one.to(device) for one in whole),
        branches=tuple(BranchTable(*(value.to(device) for value in one)) for one in parts),
        back=back.to(device),
    )


def _alike(segments: Sequence[tuple[int, ...]], *lengths: int) -> list[Sequence[tuple[int, ...]]]:
    """Put segments together whose lengths, at these places, differ by less than `_SPREAD`."""
    parts: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for one in segments:
        key = tuple(int(math.log(one[place], _SPREAD)) for place in lengths)
        parts.setdefault(key, []).append(one)
    return list(parts.values())


def _columns(segments: Sequence[tuple[int, ...]]) -> Int[Tensor, "S L"]:
    """Number the tokens of segments, given by start and length first."""
    starts = torch.tensor([one[0] for one in segments])[:, None]
    lengths = torch.tensor([one[1] for one in segments])[:, None]
    columns = torch.arange(int(lengths.max()))
    return starts + columns * (columns < lengths)


def _branch_table(segments: Sequence[tuple[int, ...]]) -> BranchTable:
    prefixes = [one[2:] for one in segments]
    lengths = torch.tensor([length for _, length in prefixes])
    return BranchTable(_columns(prefixes), lengths, _columns(segments))


def _runs(start: int, lengths: Sequence[int]) -> list[Run]:
    """Put neighbours of similar length together; those of length 0 are left out."""
    runs: list[Run] = []
    for length in lengths:  # longest first
        if not length:
            continue
        last = runs[-1] if runs else None
        if last is not None and length >= SIMILAR * last.lengths[0]:
            runs[-1] = Run(last.start, (*last.lengths, length))
        else:
            runs.append(Run(start, (length,)))
        start += length
    return runs
