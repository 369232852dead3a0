"""Partition of work into parts of nearly equal cost (load balancing).

Ranks wait for the slowest one in every step, and the cost of a row varies by an order of magnitude
where responses have a long tail.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence


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
