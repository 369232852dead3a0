"""Work dealt out so that everyone is done at about the same time.

Ranks wait for the slowest one in every step, and what a row costs varies by an order of magnitude
where responses have a long tail.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class _Part(NamedTuple):
    """Some of the items."""

    cost: int
    items: tuple[int, ...]


_NOTHING = _Part(0, ())


def partition(costs: Sequence[int], parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Deal items out to parts of nearly equal cost, by the largest differencing method.

    Every item starts as a partition of its own, with all parts but one empty. The two partitions
    whose parts differ most are merged, the costliest part of the one with the cheapest of the
    other, until one is left: large differences cancel first, and small items even out the rest.
    With ``equal_counts`` the method starts from partitions of as many items as there are parts, the
    costliest together, so that every merge keeps the counts equal; then items of the costliest and
    the cheapest part change places while that brings the two closer.

    Args:
        costs: Of each item, 0 or more.
        parts: How many to make.
        equal_counts: Give each part as many items as any other, or one less where they do not
            divide.

    Returns:
        The items of each part, ascending, the costliest part first. The same on every machine, and
        no part is empty unless there are fewer items than parts.

    Raises:
        ValueError: ``parts`` is below 1, or a cost is below 0.

    Reference:
        Karmarkar and Karp 1982, The Differencing Method of Set Partitioning; with equal counts
        Michiels et al. 2012, https://doi.org/10.1287/ijoc.1110.0471
    """
    if parts < 1:
        raise ValueError(f"parts={parts}: give at least 1")
    if any(cost < 0 for cost in costs):
        raise ValueError(f"the lowest cost is {min(costs)}: costs are 0 or more")
    by_cost = sorted(range(len(costs)), key=lambda item: -costs[item])
    width = parts if equal_counts else 1
    heap: list[tuple[int, int, list[_Part]]] = []
    for start in range(0, len(costs), width):
        singles = [_Part(costs[item], (item,)) for item in by_cost[start : start + width]]
        _push(heap, [*singles, *[_NOTHING] * (parts - len(singles))], start)
    number = len(costs)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[-1], heapq.heappop(heap)[-1]
        _push(heap, _merged(first, second), number)
        number += 1
    final = heap[0][-1] if heap else [_NOTHING] * parts
    if equal_counts:
        final = _swapped(costs, final)
    return [sorted(part.items) for part in final]


def _push(heap: list[tuple[int, int, list[_Part]]], state: list[_Part], number: int) -> None:
    # the number decides between equal differences, so that no machine decides otherwise
    heapq.heappush(heap, (state[-1].cost - state[0].cost, number, state))


def _merged(first: Sequence[_Part], second: Sequence[_Part]) -> list[_Part]:
    merged = [
        _Part(large.cost + small.cost, large.items + small.items)
        for large, small in zip(first, reversed(second), strict=True)
    ]
    # by count where costs are equal: an empty part comes after one whose items cost nothing
    return sorted(merged, key=lambda part: (-part.cost, -len(part.items)))


def _swapped(costs: Sequence[int], parts: Sequence[_Part]) -> list[_Part]:
    """Swap items of the costliest and the cheapest part until no swap brings them closer."""
    by_load = sorted(parts, key=lambda part: -part.cost)
    while (swap := _best_swap(costs, by_load[0], by_load[-1])) is not None:
        given, taken = swap
        saved = costs[given] - costs[taken]
        high, *between, low = by_load
        kept = tuple(taken if item == given else item for item in high.items)
        rest = tuple(given if item == taken else item for item in low.items)
        changed = [_Part(high.cost - saved, kept), *between, _Part(low.cost + saved, rest)]
        by_load = sorted(changed, key=lambda part: -part.cost)
    return by_load


def _best_swap(costs: Sequence[int], high: _Part, low: _Part) -> tuple[int, int] | None:
    """Return the items, one of each part, whose swap leaves the smallest difference; None: none.

    Giving one that is dearer by ``d`` turns a difference of ``D`` into ``|D - 2d|``.
    """
    difference = high.cost - low.cost
    offered = sorted(low.items, key=lambda item: costs[item])
    prices = [costs[item] for item in offered]
    smallest, best = difference, None
    for item in high.items:
        place = bisect_left(prices, costs[item] - difference / 2)
        for other in range(max(place - 1, 0), min(place + 1, len(prices))):
            left = abs(difference - 2 * (costs[item] - prices[other]))
            if left < smallest:
                smallest, best = left, (item, offered[other])
    return best


def loads(costs: Sequence[int], parts: Iterable[Sequence[int]]) -> list[int]:
    """Return the cost of each part."""
    return [sum(costs[item] for item in part) for part in parts]


def imbalance(costs: Sequence[int]) -> float:
    """Return the largest cost over the mean one: 1 where all are equal, and where all are 0.

    It is how much longer everyone takes than with the same work spread evenly.
    """
    total = sum(costs)
    return max(costs) * len(costs) / total if total else 1.0
