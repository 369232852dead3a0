"""Rows change ranks, so that each has about as many tokens to compute in a step."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, distributed

from lrlhf.run.collectives import Collectives
from lrlhf.types import Experience


def partition(costs: Sequence[int], parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Partition items into parts of nearly equal cost.

    Each item, the costliest first, goes to the cheapest part that has room. Then items of the
    costliest and the cheapest part are swapped while that brings the two closer.

    Args:
        costs: Cost of each item, 0 or more.
        parts: Number of parts.
        equal_counts: Whether sizes of parts differ by at most one.

    Returns:
        The items of each part, ascending, the costliest part first. The result is deterministic,
        and no part is empty unless there are fewer items than parts.

    Raises:
        ValueError: ``parts`` is below 1, or a cost is below 0.

    Reference:
        Graham 1969, Bounds on Multiprocessing Timing Anomalies, https://doi.org/10.1137/0117039
    """
    if parts < 1:
        raise ValueError(f"parts={parts}: give at least 1")
    if any(cost < 0 for cost in costs):
        raise ValueError(f"the lowest cost is {min(costs)}: costs are 0 or more")
    each, more = divmod(len(costs), parts)
    # the costliest items go to the first parts: where counts differ by one, the last have more
    room = [each + (part >= parts - more) if equal_counts else len(costs) for part in range(parts)]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    # by count where loads are equal, so that items which cost nothing leave no part empty
    heap = [(0, 0, part) for part in range(parts) if room[part]]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, count, part = heapq.heappop(heap)
        dealt[part].append(item)
        if count + 1 < room[part]:
            heapq.heappush(heap, (load + costs[item], count + 1, part))
    while True:
        dealt.sort(key=lambda items: -sum(costs[item] for item in items))
        high, low = dealt[0], dealt[-1]
        if (swap := _best_swap(costs, high, low)) is None:
            return [sorted(items) for items in dealt]
        down, up = swap
        high[high.index(down)], low[low.index(up)] = up, down


def _best_swap(
    costs: Sequence[int], high: Sequence[int], low: Sequence[int]
) -> tuple[int, int] | None:
    """Return the items, one of each part, whose swap leaves the smallest difference, if any does.

    Swapping items whose costs differ by ``d`` turns a difference of ``D`` into ``|D - 2d|``.
    """
    most, least = loads(costs, [high, low])
    smallest = difference = most - least
    best = None
    candidates = sorted(low, key=lambda item: costs[item])
    prices = [costs[item] for item in candidates]
    for item in high:
        index = bisect_left(prices, costs[item] - difference / 2)
        for other in range(max(index - 1, 0), min(index + 1, len(prices))):
            remaining = abs(difference - 2 * (costs[item] - prices[other]))
            if remaining < smallest:
                smallest, best = remaining, (item, candidates[other])
    return best


def loads(costs: Sequence[int], parts: Iterable[Sequence[int]]) -> list[int]:
    """Return the cost of each part."""
    return [sum(costs[item] for item in part) for part in parts]


def imbalance(costs: Sequence[int]) -> float:
    """Return the largest cost over the mean, 1 where all are 0: the slowdown by uneven work."""
    total = sum(costs)
    return max(costs) * len(costs) / total if total else 1.0


MIN_GAIN: Final = 0.02
"""Share of the slowest rank's tokens that an exchange must save to be worth it."""

_PADDING: Final = {"kept_mass": 1.0, "importance_weights": 1.0}
"""What a column has where there is no token, unless 0."""


class Balanced(NamedTuple):
    """The rows of this rank in one step, and how evenly all ranks are loaded."""

    rows: Experience
    before: float
    """Tokens of the rank with most over the mean of the ranks, as the rows came."""
    after: float
    """The same of ``rows``."""


def balance_over_ranks(rows: Experience, collectives: Collectives) -> Balanced:
    """Exchange rows between the ranks so that their numbers of tokens are nearly equal.

    The rows of all ranks together stay the same, bit for bit, and with them all sums over the ranks
    and the gradient. Rows of one prompt stay together and in their order, and are consecutive
    afterwards; a prompt costs its tokens once, however many responses it has. ``group_ids`` are new
    and no two ranks have one in common; what lies in the padding is new too.

    All ranks call it with their rows of the same optimizer step. Nothing is exchanged, and the very
    object is returned, in one process and where

    - the slowest rank would have less than 2 % fewer tokens,
    - any row shows images or videos (what they show is read and kept per process),
    - some rank has a column that another lacks, or one that is neither `[B]` nor `[B, T]`,
    - ranks would not get equally many rows, which complete groups of one size allow. Strategies
      that split weights need ranks to take equally many micro-batches, and a rank with fewer rows
      than micro-batches could not.

    Args:
        rows: Of one optimizer step on this rank, at least one.
        collectives: The ranks.
    """
    if collectives.world_size == 1:
        return Balanced(rows, 1.0, 1.0)
    world = collectives.world_size
    gathered = collectives.gather((_column_kinds(rows), _groups(rows, collectives.rank)))
    kinds, groups = gathered[0][0], [group for _, own in gathered for group in own]
    movable = kinds is not None and all(other == kinds for other, _ in gathered)
    costs, counts = [group.cost for group in groups], [len(group.rows) for group in groups]
    parts = partition(costs, world, equal_counts=True)
    now = [[i for i, group in enumerate(groups) if group.rank == rank] for rank in range(world)]
    before, after = imbalance(loads(costs, now)), imbalance(loads(costs, parts))
    fits = len(set(loads(counts, parts))) == 1
    if not movable or not fits or 1 - after / before < MIN_GAIN:
        return Balanced(rows, before, before)
    return Balanced(_exchanged(rows, groups, parts, collectives), before, after)


class _Group(NamedTuple):
    """Rows of one prompt."""

    rank: int
    """Where they are."""
    rows: list[int]
    cost: int
    """Tokens of the prompt, once, and of what follows it in each row."""
    tokens: int
    """Tokens of the rows as they are sent, with a prompt each."""


def _groups(rows: Experience, rank: int) -> list[_Group]:
    """Collect the rows of each prompt of this rank."""
    lengths = rows.lengths.tolist()
    # a row without a response is all prompt
    prompts = torch.where(
        rows.response_mask.any(dim=1), rows.response_mask.int().argmax(dim=1), rows.lengths
    ).tolist()
    members: dict[int, list[int]] = {}
    for row, group in enumerate(rows.group_ids.tolist()):
        members.setdefault(group, []).append(row)
    return [
        _Group(
            rank,
            own,
            cost=max(prompts[row] for row in own) + sum(lengths[row] - prompts[row] for row in own),
            tokens=sum(lengths[row] for row in own),
        )
        for own in members.values()
    ]


def _column_kinds(rows: Experience) -> dict[str, tuple[str, int]] | None:
    """Say what each column is; None: there is one that stays where it is, and its rows with it."""
    values = {field.name: getattr(rows, field.name) for field in fields(rows)}
    same = ("columns", "old_source")  # of all rows, and of all ranks
    columns = {name: one for name, one in values.items() if one is not None and name not in same}
    shapes = ((), rows.input_ids.shape[1:])
    if not all(
        isinstance(column, Tensor) and column.shape[1:] in shapes for column in columns.values()
    ):
        return None
    return {name: (str(value.dtype), value.dim()) for name, value in columns.items()}


def _exchanged(
    rows: Experience,
    groups: Sequence[_Group],
    parts: Sequence[Sequence[int]],
    collectives: Collectives,
) -> Experience:
    """Send each row where it belongs, ``parts`` of ``groups`` by rank, and join what arrives."""
    rank = collectives.rank
    leaving = [[index for index in part if groups[index].rank == rank] for part in parts]
    coming = [
        [index for index in parts[rank] if groups[index].rank == source]
        for source in range(len(parts))
    ]
    sent = [(group, row) for group in chain(*leaving) for row in groups[group].rows]
    ids, order = torch.tensor(sent).to(rows.group_ids).unbind(dim=1)
    chosen = replace(rows.select(order), group_ids=ids)

    columns = {field.name: getattr(chosen, field.name) for field in fields(chosen)}
    tensors = {name: value for name, value in columns.items() if isinstance(value, Tensor)}
    mask = tensors.pop("attention_mask")
    per_row = {name: value for name, value in tensors.items() if value.dim() == 1}
    per_token = {name: value[mask] for name, value in tensors.items() if value.dim() == 2}

    counts = [len(group.rows) for group in groups]
    arrived: dict[str, Any] = _swapped(
        {**per_row, "lengths": chosen.lengths},
        loads(counts, leaving),
        loads(counts, coming),
        collectives,
    )
    lengths = arrived.pop("lengths")
    mask = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
    tokens = [group.tokens for group in groups]
    came = _swapped(per_token, loads(tokens, leaving), loads(tokens, coming), collectives)
    for name, entries in came.items():
        padded = torch.full_like(mask, _PADDING.get(name, 0), dtype=entries.dtype)
        padded[mask] = entries
        arrived[name] = padded
    return replace(rows, attention_mask=mask, **arrived)


def _swapped(
    columns: Mapping[str, Tensor], leaving: list[int], coming: list[int], collectives: Collectives
) -> dict[str, Tensor]:
    """Send and receive columns of one length, `[N]` each, on one device.

    They travel as one matrix of bytes, so that every back end can send every type, unchanged.

    Args:
        columns: By name.
        leaving: Entries by rank that they go to; the first ones go to the first rank, and so on.
        coming: Entries by rank that they come from, in the order they arrive.
        collectives: The ranks.
    """
    parts = [column.contiguous()[:, None].view(torch.uint8) for column in columns.values()]
    out = torch.cat(parts, dim=1).to(collectives.trainer.strategy.root_device)
    arrived = out.new_empty(sum(coming), out.shape[1])
    distributed.all_to_all_single(arrived, out, coming, leaving)
    split = torch.split(arrived.to(parts[0].device), [part.shape[1] for part in parts], dim=1)
    return {
        # a copy: bytes in the middle of a row are not where a number may begin
        name: part.clone(memory_format=torch.contiguous_format).view(column.dtype).squeeze(1)
        for (name, column), part in zip(columns.items(), split, strict=True)
    }
