"""Sequence packing with prefix sharing: rows one after another, common beginnings only once.

A token attends to its own row alone (a block-diagonal mask; tree attention where rows share).

The responses to one prompt, or the two answers of a pair, are a prefix tree: the tokens that all of
them begin with, then a branch for each. A causal model computes the same hidden states for those
tokens in every row, so once is enough. A row may itself branch, see
`lrlhf.types.SequenceBatch.forks`.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.utils.rnn import pad_sequence

from lrlhf.models.media_inputs import placed_media
from lrlhf.types import Media

BLOCK = 128
"""Tokens along each side of the blocks that FlexAttention computes or leaves out as a whole."""


class Chained(Protocol):
    """Consecutive tokens of a packed row each of which follows the one before."""

    @property
    def before(self) -> Int[Tensor, " P"]:
        """Places of the tokens that the first one follows, from the beginning on."""

    @property
    def own(self) -> Int[Tensor, " L"]:
        """Their places."""


@dataclass(frozen=True, eq=False)
class DepthFirstOrder:
    """The numbers of a depth-first walk over the tokens of a packed row."""

    enter: Int[Tensor, " N"]
    leave: Int[Tensor, " N"]
    depth: Int[Tensor, " N"]
    """Tokens before each, of those that it sees."""
    _masks: dict[int | None, BlockMask] = field(default_factory=dict)

    def mask(self, window: int | None) -> BlockMask:
        """Return what FlexAttention computes; all layers with the same window share it.

        Args:
            window: Keys that a query sees at most, itself included; None: all before it.
        """
        if window not in self._masks:
            self._masks[window] = self._new_mask(window)
        return self._masks[window]

    def _new_mask(self, window: int | None) -> BlockMask:
        """Find the blocks from the smallest and largest number in each.

        ``create_block_mask`` would compute the whole table of queries and keys.
        """
        enter, leave, depth = self.enter, self.leave, self.depth
        # a tensor, because code is compiled anew for each number that it contains
        reach = None if window is None else depth + window

        def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (enter[key] <= enter[query]) & (enter[query] < leave[key])

        def seen_in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            assert reach is not None
            return seen(batch, head, query, key) & (depth[query] < reach[key])

        first, last = _extremes(enter)
        first_end, last_end = _extremes(leave)
        some = (first <= last[:, None]) & (first[:, None] < last_end)
        every = (last <= first[:, None]) & (last[:, None] < first_end)
        if reach is not None:
            (least, most), (least_reach, most_reach) = _extremes(depth), _extremes(reach)
            some &= least[:, None] < most_reach
            every &= most[:, None] < least_reach
        if len(enter) % BLOCK:  # what is behind the end is not seen
            every[-1], every[:, -1] = False, False
        return BlockMask.from_kv_blocks(
            *_listed(some & ~every),
            *_listed(every),
            BLOCK_SIZE=BLOCK,
            mask_mod=seen if window is None else seen_in_window,
            seq_lengths=(len(enter), len(enter)),
        )


def depth_first_order(chains: Sequence[Chained], device: torch.device) -> DepthFirstOrder:
    """Number the tokens of a packed row.

    Args:
        chains: In any order; together they hold every place once.
        device: Of the numbers.
    """
    chains = sorted(chains, key=lambda chain: int(chain.own[0]))
    starts = [int(chain.own[0]) for chain in chains]
    sizes = [len(chain.own) for chain in chains]  # with all that follows, in the end
    followers: list[list[tuple[int, int]]] = [[] for _ in chains]
    for number in reversed(range(len(chains))):  # what a chain follows is in front of it
        before = chains[number].before
        if len(before):
            position = int(before[-1])
            parent = bisect_right(starts, position) - 1
            followers[parent].append((position - starts[parent], number))
            sizes[parent] += sizes[number]
    enters, end = [-1] * len(chains), 0
    parts = []
    for number, chain in enumerate(chains):
        if enters[number] < 0:  # it follows nothing
            enters[number], end = end, end + sizes[number]
        numbers = torch.arange(len(chain.own), dtype=torch.int32)
        enter, free = numbers + enters[number], enters[number] + len(chain.own)
        leave = torch.full_like(numbers, free)
        # the deepest first: what follows a token includes what follows the tokens after it
        for offset, follower in sorted(followers[number], key=lambda each: (-each[0], each[1])):
            enters[follower], free = free, free + sizes[follower]
            leave[: offset + 1] += sizes[follower]
        parts.append(torch.stack([enter, leave, numbers + len(chain.before)]))
    enter, leave, depth = torch.cat(parts, dim=1).to(device)
    return DepthFirstOrder(enter, leave, depth)


class RowBounds(NamedTuple):
    """Where the rows of a packed row begin and end, as varlen kernels of FlashAttention read it."""

    cu_seqlens: Int[Tensor, " R+1"]
    """Tokens before each row, and of all rows; int32."""
    max_seqlen: int
    """Tokens of the longest row."""


def row_bounds(chains: Sequence[Chained], device: torch.device) -> RowBounds | None:
    """Return the bounds of rows that share nothing; None: some chain follows a prefix."""
    if not chains or any(len(chain.before) for chain in chains):
        return None
    lengths = [len(own) for own in sorted((c.own for c in chains), key=lambda own: int(own[0]))]
    ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return RowBounds(ends.to(device), max(lengths))


def _extremes(numbers: Int[Tensor, " N"]) -> tuple[Int[Tensor, " C"], Int[Tensor, " C"]]:
    """Return the least and the greatest number in each block."""
    count = -(-len(numbers) // BLOCK)
    places = torch.arange(count * BLOCK, device=numbers.device).clamp(max=len(numbers) - 1)
    return numbers[places].view(count, BLOCK).aminmax(dim=1)


def _listed(blocks: Bool[Tensor, "C D"]) -> tuple[Int[Tensor, "1 1 C"], Int[Tensor, "1 1 C D"]]:
    """Return how many blocks there are in each row, and their columns first."""
    columns = blocks.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    count = blocks.sum(dim=1)
    return count.to(torch.int32)[None, None], columns.to(torch.int32)[None, None]


class Compacted(NamedTuple):
    """Rows whose attended tokens come first, in order, with nothing between them."""

    input_ids: Int[Tensor, "B T"]
    attention_mask: Bool[Tensor, "B T"]
    order: Int[Tensor, "B T"]
    """Column in the original row of every column here."""
    forks: Int[Tensor, "B T"] | None = None
    """See `lrlhf.types.SequenceBatch`."""
    experts: Int[Tensor, "B T L K"] | None = None
    """Those that routers are to choose, see `lrlhf.types.SequenceBatch`."""

    @property
    def previous(self) -> Int[Tensor, "B T"]:
        """Column of the token that each token follows; -1: it is the first."""
        before = torch.arange(self.order.shape[1], device=self.order.device) - 1
        return before.expand(self.order.shape) if self.forks is None else before - self.forks


def compact(
    input_ids: Int[Tensor, "B T"],
    attention_mask: Bool[Tensor, "B T"],
    forks: Int[Tensor, "B T"] | None = None,
    experts: Int[Tensor, "B T L K"] | None = None,
) -> Compacted:
    """Move the attended tokens of every row to its start, in order.

    Right-padded rows stay as they are. After it every model family numbers positions rightly by
    itself, whether the padding was at the left, at the right or in the middle.
    """
    order = torch.argsort((~attention_mask).to(torch.uint8), dim=1, stable=True)
    mask = attention_mask.gather(1, order)
    if forks is not None:
        forks = forks.gather(1, order) * mask
    if experts is not None:
        experts = experts[torch.arange(len(order), device=order.device)[:, None], order]
    return Compacted(input_ids.gather(1, order), mask, order, forks, experts)


class Stretch(NamedTuple):
    """Consecutive columns of a row each of which follows the one before."""

    start: int
    end: int
    before: tuple[tuple[int, int], ...]
    """Start and end of the columns that the first one follows, from the beginning on."""

    @property
    def depth(self) -> int:
        """Tokens before the first."""
        return sum(end - start for start, end in self.before)


def stretches(forks: Sequence[int] | None, length: int) -> list[Stretch]:
    """Cut a row where it goes on from an earlier place.

    Args:
        forks: Of the row's tokens, see `lrlhf.types.SequenceBatch`.
        length: Its tokens.
    """
    starts = [0, *(column for column in range(1, length) if forks and forks[column])]
    result: list[Stretch] = []
    for start, end in zip(starts, [*starts[1:], length], strict=True):
        last = start - 1 - (forks[start] if forks else 0)
        before: tuple[tuple[int, int], ...] = ()
        if last >= 0:
            left = result[bisect_right(starts, last) - 1]
            before = (*left.before, (left.start, last + 1))
        result.append(Stretch(start, end, before))
    return result


class Chains(NamedTuple):
    """The rows of a batch without forks: each branch with all that is before it."""

    rows: Compacted
    owners: Int[Tensor, " C"]
    """The row that each is of."""
    places: Int[Tensor, "B T"]
    """Where each token of the batch is among the flattened chains; 0 behind a row's end."""
    source: Int[Tensor, "C W"]
    """Of every token of the chains, its place in the flattened rows ``[B * T]``."""


def unfold(rows: Compacted) -> Chains:
    """Write out the branches of rows that fork."""
    if rows.forks is None or not len(rows.forks):
        places = torch.arange(rows.order.numel(), device=rows.order.device).view(rows.order.shape)
        owners = torch.arange(len(places), device=places.device)
        return Chains(rows, owners, places, places)
    device, lengths = rows.order.device, rows.attention_mask.sum(dim=1).tolist()
    columns, owners_of = [], []
    for row, (forks, length) in enumerate(zip(rows.forks.tolist(), lengths, strict=True)):
        parts = stretches(forks, length)
        gone_on_from = {part.before[-1][1] for part in parts if part.before}
        for part in parts:
            if part.end in gone_on_from:  # another chain begins with this one
                continue
            runs = (*part.before, (part.start, part.end))
            columns.append(torch.cat([torch.arange(*run) for run in runs]))
            owners_of.append(row)
    owners = torch.tensor(owners_of, device=device)
    chosen = pad_sequence(columns, batch_first=True).to(device)
    width = chosen.shape[1]
    mask = torch.arange(width) < torch.tensor([len(each) for each in columns])[:, None]
    places = torch.zeros(rows.order.shape, dtype=torch.long)
    for chain, (row, own) in enumerate(zip(owners_of, columns, strict=True)):
        places[row, own] = chain * width + torch.arange(len(own))
    chains = Compacted(rows.input_ids[owners[:, None], chosen], mask.to(device), chosen)
    source = owners[:, None] * rows.order.shape[1] + chosen
    return Chains(chains, owners, places.to(device), source)


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


class SegmentGroup(NamedTuple):
    """Segments of similar length, whose attention is computed together.

    Places are those of tokens in the packed row; rows are filled up with their first.
    """

    before: Int[Tensor, "R P"]
    """Places of the prefix that each follows; P = 0: they are prefixes themselves."""
    before_lengths: Int[Tensor, " R"]
    own: Int[Tensor, "R L"]


@dataclass(frozen=True, eq=False)
class Segments:
    """Where the segments lie in a packed row: of each tree the prefix, then the branches.

    Attention functions read it. It is no tensor, so nothing casts, splits or copies it.
    """

    parts: tuple[SegmentGroup, ...]
    back: Int[Tensor, " N"]
    """Where each packed token is among the flattened ``own`` of the parts."""
    masks: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """Made by the first layer that needs them, read by the others."""
    windows: list[int | None] = field(default_factory=list)
    """How far each layer said that it sees, as it was computed."""
    depth_first: DepthFirstOrder | None = None
    """Of the tokens, for FlexAttention; None: the parts are computed one after another."""
    bounds: RowBounds | None = None
    """Of rows without prefixes that have a ``depth_first`` order, for FlashAttention."""


@dataclass(frozen=True, eq=False)
class Packed:
    """The rows of a batch as one row."""

    trees: tuple[Tree, ...]
    source: Int[Tensor, " N"]
    """Of every packed token, its place in the flattened rows ``[B * T]``."""
    index: Int[Tensor, "B T"]
    """Of every token of the rows, its place in the packed row; 0 behind a row's end."""
    depths: Int[Tensor, "B T"]
    """Tokens before every token of the rows, of those that it sees."""
    segments: Segments


_SPREAD = 1.5
"""The longest of the segments that are computed together is at most this many times as long as the
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
    placeholders: Mapping[str, int] = MappingProxyType({}),
) -> list[Tree]:
    """Find what rows have in common.

    Args:
        rows: The rows.
        groups: Rows with equal numbers may share what they begin with; None: none does.
        media: Of each row; only rows that show the same object share anything, or, where rows
            show parts, what is before the first part that differs.
        placeholders: Token ids that stand for media, by kind. Media without parts are given to
            the model once, so all of a row's placeholders lie in what is shared, or nothing is.

    Returns:
        Trees that hold every row once, the longest prefix first.
    """
    known = _known.get()
    if known is not None:
        return list(known)
    ids, mask = rows.input_ids.cpu(), rows.attention_mask.cpu()
    forks = torch.zeros_like(ids) if rows.forks is None else rows.forks.cpu()
    lengths = mask.sum(dim=1).tolist()
    numbers = list(range(len(lengths))) if groups is None else groups.tolist()
    shown = [None if entry is None else id(entry) for entry in media or [None] * len(lengths)]
    if placeholders and any(entry is not None and entry.parts for entry in media or ()):
        ids, shown = _numbered_media(ids, media or (), placeholders), [None] * len(lengths)
    members: dict[tuple[int, int | None], list[int]] = {}
    for row, key in enumerate(zip(numbers, shown, strict=True)):
        members.setdefault(key, []).append(row)
    marked = torch.tensor(list(placeholders.values()), dtype=ids.dtype)
    unforked = mask & (forks == 0)
    trees: list[Tree] = []
    for group in members.values():
        prefix = lengths[group[0]]
        if len(group) > 1:
            prefix = _common(ids, unforked, group, rows.experts)
        marks = torch.isin(ids[group], marked) & mask[group]
        if prefix > 0 and not marks[:, prefix:].any():
            trees.append(_tree(group, prefix, lengths))
        else:
            trees += [_tree([row], lengths[row], lengths) for row in group]
    return sorted(trees, key=lambda tree: -tree.prefix)


def _numbered_media(
    ids: Tensor, media: Sequence[Media | None], placeholders: Mapping[str, int]
) -> Tensor:
    """Return ids whose placeholders are numbers below 0, the same for the same part only."""
    ids, numbers = ids.clone(), dict[int, int]()
    for row, placed in enumerate(placed_media(ids, media, placeholders)):
        for part, columns in placed:
            ids[row, columns] = -1 - numbers.setdefault(id(part), len(numbers))
    return ids


def _common(ids: Tensor, mask: Tensor, group: Sequence[int], experts: Tensor | None) -> int:
    """Count the tokens that all rows of a group begin with, and send through the same experts."""
    same = (ids[group] == ids[group[0]]) & mask[group]
    if experts is not None:
        same &= (experts[group] == experts[group[0]]).flatten(2).all(dim=2).cpu()
    return int(same.all(dim=0).long().cumprod(dim=0).sum())


def _tree(rows: Sequence[int], prefix: int, lengths: Sequence[int]) -> Tree:
    ordered = sorted(rows, key=lambda row: -lengths[row])
    branches = tuple(lengths[row] - prefix for row in ordered) if len(rows) > 1 else ()
    return Tree(tuple(ordered), prefix, branches)


def pack(rows: Compacted, trees: Sequence[Tree], *, depth_first: bool = False) -> Packed:
    """Lay the trees of `find_trees` one after another, perhaps with a `DepthFirstOrder` of them."""
    width = rows.input_ids.shape[1]
    source: list[Tensor] = []
    index = torch.zeros(rows.input_ids.shape, dtype=torch.long)
    columns = torch.arange(width)
    start = 0
    for tree in trees:
        source.append(tree.rows[0] * width + columns[: tree.prefix])
        index[list(tree.rows), : tree.prefix] = start + columns[: tree.prefix]
        start += tree.prefix
        for row, length in zip(tree.rows, tree.branches, strict=False):
            own = columns[tree.prefix : tree.prefix + length]
            source.append(row * width + own)
            index[row, tree.prefix : tree.prefix + length] = start + columns[:length]
            start += length
    device, joined = rows.input_ids.device, torch.cat(source)
    cut = _cut(rows)
    segments = _segments(trees, index, cut)
    depths = columns.expand(index.shape).clone()
    for row, parts in cut.items():
        for part in parts:
            depths[row, part.start : part.end] += part.depth - part.start
    return Packed(
        trees=tuple(trees),
        source=joined.to(device),
        index=index.to(device),
        depths=depths.to(device),
        segments=_laid_out(segments, len(joined), device, depth_first=depth_first),
    )


def _cut(rows: Compacted) -> dict[int, list[Stretch]]:
    """Return the stretches of the rows that fork."""
    if rows.forks is None:
        return {}
    forks, lengths = rows.forks.tolist(), rows.attention_mask.sum(dim=1).tolist()
    each = enumerate(zip(forks, lengths, strict=True))
    return {row: stretches(own, length) for row, (own, length) in each if any(own)}


def _segments(
    trees: Sequence[Tree], index: Int[Tensor, "B T"], cut: Mapping[int, Sequence[Stretch]]
) -> list[_Segment]:
    """Return all prefixes, then all branches, of at least one token each."""
    prefixes, branches = [], []
    for tree in trees:
        alone = not tree.branches
        for part in cut.get(tree.rows[0], ()) if alone else ():
            prefixes.append(_segment(index[tree.rows[0]], part))
        if not alone or tree.rows[0] not in cut:
            prefixes.append(_segment(index[tree.rows[0]], Stretch(0, tree.prefix, ())))
        for row, length in zip(tree.rows, tree.branches, strict=False):
            end = tree.prefix + length
            for part in cut.get(row, (Stretch(0, end, ()),)):
                branches.append(_segment(index[row], _behind(part, tree.prefix)))
    return [prefix for prefix in prefixes + branches if len(prefix.own)]


def _laid_out(
    segments: Sequence[_Segment], end: int, device: torch.device, *, depth_first: bool
) -> Segments:
    parts = [_part(alike) for alike in _alike(segments)]
    # the first place that a token has among the flattened parts is its own
    flat = torch.cat([torch.empty(0, dtype=torch.long), *(part.own.flatten() for part in parts)])
    back = torch.full((end,), len(flat)).scatter_reduce(
        0, flat, torch.arange(len(flat)), reduce="amin"
    )
    moved = (SegmentGroup(*(places.to(device) for places in part)) for part in parts)
    return Segments(
        tuple(moved),
        back.to(device),
        depth_first=depth_first_order(segments, device) if depth_first else None,
        bounds=row_bounds(segments, device) if depth_first else None,
    )


def _behind(part: Stretch, prefix: int) -> Stretch:
    """Return what of a stretch is behind the tokens that rows share."""
    if part.start >= prefix:
        return part
    return Stretch(prefix, max(prefix, part.end), ((part.start, prefix),))


class _Segment(NamedTuple):
    """Places of tokens in the packed row."""

    before: Int[Tensor, " P"]
    own: Int[Tensor, " L"]


def _segment(index: Int[Tensor, " T"], part: Stretch) -> _Segment:
    before = [index[start:end] for start, end in part.before]
    return _Segment(torch.cat([index[:0], *before]), index[part.start : part.end])


def _alike(segments: Iterable[_Segment]) -> list[list[_Segment]]:
    """Put segments together whose lengths, and those of their prefixes, are similar."""
    parts: dict[tuple[int, ...], list[_Segment]] = {}
    for segment in segments:
        lengths = (len(segment.own), len(segment.before))
        key = tuple(int(math.log(size, _SPREAD)) if size else -1 for size in lengths)
        parts.setdefault(key, []).append(segment)
    return list(parts.values())


def _part(segments: Sequence[_Segment]) -> SegmentGroup:
    return SegmentGroup(
        before=_filled([segment.before for segment in segments]),
        before_lengths=torch.tensor([len(each.before) for each in segments]),
        own=_filled([item.own for item in segments]),
    )


def _filled(places: Sequence[Int[Tensor, " L"]]) -> Int[Tensor, "R L"]:
    """Fill rows up with their first."""
    filled = pad_sequence(list(places), batch_first=True, padding_value=-1)
    return filled if not filled.shape[1] else torch.where(filled < 0, filled[:, :1], filled)
