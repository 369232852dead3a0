"""Work dealt out so that everyone is done at about the same time.

Ranks wait for the slowest one in every step, and what a row costs varies by an order of magnitude
where responses have a long tail.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence


def partition(costs: Sequence[int], parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Deal items out to parts of nearly equal cost.

    Each item, the costliest first, goes to the cheapest part that has room. Then items of the
    costliest and the cheapest part change places while that brings the two closer.

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
        given, taken = swap
        high[high.index(given)], low[low.index(taken)] = taken, given


def _best_swap(
    costs: Sequence[int], high: Sequence[int], low: Sequence[int]
) -> tuple[int, int] | None:
    """Return the items, one of each part, whose swap leaves the smallest difference; None: none.

    Giving one that is dearer by ``d`` turns a difference of ``D`` into ``|D - 2d|``.
    """
    most, least = loads(costs, [high, low])
    smallest = difference = most - least
    best = None
    offered = sorted(low, key=lambda item: costs[item])
    prices = [costs[item] for item in offered]
    for item in high:
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
