"""Rows laid one after another without padding, what several of them begin with only once.

The responses to one prompt, or the two answers of a pair, are a tree: the tokens that all of them
begin with, then a branch for each. A causal model computes the same hidden states for those tokens
in every row, so once is enough.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
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


class Part(NamedTuple):
    """Segments of similar length, whose attention is computed together.

    Places are those of tokens in the packed row; rows are filled up with their first.
    """

    before: Int[Tensor, "R P"]
    """Places of the prefix that each follows; P = 0: they are prefixes themselves."""
    before_lengths: Int[Tensor, " R"]
    own: Int[Tensor, "R L"]


@dataclass(frozen=True, eq=False)
class Segments:
    """Where the segments lie in a packed row: all prefixes, then all branches, tree by tree.

    Attention functions read it. It is no tensor, so nothing casts, splits or copies it.
    """

    parts: tuple[Part, ...]
    back: Int[Tensor, " N"]
    """Where each packed token is among the flattened ``own`` of the parts."""
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


_SPREAD = 1.5
"""Of segments that are computed together the longest is less than so much longer than the
shortest."""

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
    """Lay the trees of `find_trees` one after another."""
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
    starts = list(accumulate((tree.prefix for tree in trees), initial=0))
    prefixes, branches, end = [], [], starts[-1]
    for start, tree in zip(starts, trees, strict=False):
        prefixes.append(_Segment(start, tree.prefix, 0, 0))
        for length in tree.branches:
            branches.append(_Segment(end, length, start, tree.prefix))
            end += length
    parts = [_part(alike) for alike in _alike(one for one in prefixes + branches if one.length)]
    # the first place that a token has among the flattened parts is its own
    flat = torch.cat([torch.empty(0, dtype=torch.long), *(part.own.flatten() for part in parts)])
    back = torch.full((end,), len(flat)).scatter_reduce(
        0, flat, torch.arange(len(flat)), reduce="amin"
    )
    moved = (Part(*(places.to(device) for places in part)) for part in parts)
    return Segments(tuple(moved), back.to(device))


class _Segment(NamedTuple):
    start: int
    length: int
    prefix_start: int
    prefix: int


def _alike(segments: Iterable[_Segment]) -> list[list[_Segment]]:
    """Put segments together whose lengths, and those of their prefixes, are similar."""
    parts: dict[tuple[int, ...], list[_Segment]] = {}
    for one in segments:
        lengths = (one.length, one.prefix)
        key = tuple(int(math.log(size, _SPREAD)) if size else -1 for size in lengths)
        parts.setdefault(key, []).append(one)
    return list(parts.values())


def _part(segments: Sequence[_Segment]) -> Part:
    return Part(
        before=_places([(one.prefix_start, one.prefix) for one in segments]),
        before_lengths=torch.tensor([one.prefix for one in segments]),
        own=_places([(one.start, one.length) for one in segments]),
    )


def _places(runs: Sequence[tuple[int, int]]) -> Int[Tensor, "R L"]:
    """Number the tokens of runs that are given by start and length."""
    starts, lengths = (torch.tensor(numbers)[:, None] for numbers in zip(*runs, strict=True))
    columns = torch.arange(max(length for _, length in runs))
    return starts + columns * (columns < lengths)
