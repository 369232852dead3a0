from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from lrlhf.run.sequence_balancing import imbalance, loads, partition


def long_tailed(seed: int, size: int) -> list[int]:
    """Token counts with a median near 200 and a tail that is cut at 4096."""
    drawn = np.random.default_rng(seed).lognormal(mean=5.3, sigma=0.9, size=size)
    return [min(4096, int(value) + 1) for value in drawn]


def best_load(costs: Sequence[int], parts: int, *, equal_counts: bool) -> int:
    """The smallest load that the costliest part can have, found by trying everything."""
    smallest = sum(costs)
    for places in product(range(parts), repeat=len(costs)):
        sums, counts = np.bincount(places, costs, parts), np.bincount(places, minlength=parts)
        if not equal_counts or np.ptp(counts) <= 1:
            smallest = min(smallest, int(sums.max()))
    return smallest


def test_long_tails_are_evened_out_better_than_by_dealing_in_turn() -> None:
    for equal_counts in (False, True):
        costs = long_tailed(0, 256)
        order = sorted(range(256), key=lambda item: -costs[item])
        in_turn = imbalance(loads(costs, [order[part::8] for part in range(8)]))
        dealt = partition(costs, 8, equal_counts=equal_counts)
        assert imbalance(loads(costs, dealt)) < 1.001 < 1.05 < in_turn
    assert imbalance([3, 1, 2]) == pytest.approx(1.5)
    assert imbalance([0, 0]) == 1.0


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize(("size", "parts"), [(8, 2), (7, 3)])
def test_small_cases_come_near_to_the_best_of_all_partitions(
    size: int, parts: int, equal_counts: bool
) -> None:
    for seed in range(3):
        costs = long_tailed(seed, size)
        dealt = partition(costs, parts, equal_counts=equal_counts)
        best = best_load(costs, parts, equal_counts=equal_counts)
        assert best <= max(loads(costs, dealt)) <= 1.1 * best


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize(("size", "parts"), [(0, 3), (2, 3), (7, 3), (67, 8), (5, 1)])
def test_every_item_is_dealt_once(size: int, parts: int, equal_counts: bool) -> None:
    for costs in (long_tailed(size, size), [3] * size, [0] * size):
        dealt = partition(costs, parts, equal_counts=equal_counts)
        assert partition(list(costs), parts, equal_counts=equal_counts) == dealt
        assert sorted(item for part in dealt for item in part) == list(range(size))
        assert loads(costs, dealt) == sorted(loads(costs, dealt), reverse=True)
        counts = [len(part) for part in dealt]
        assert len(counts) == parts
        assert size < parts or min(counts) > 0
        assert not equal_counts or max(counts) - min(counts) <= 1
