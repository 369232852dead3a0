"""How much an evaluation can see, and how much it would take to see more."""

from __future__ import annotations

import math
from collections.abc import Callable

from lrlhf.statistics.paired import Variances
from lrlhf.statistics.student_t import t_test_power

_MOST_PROMPTS, _MOST_SEEDS = 10_000_000, 1000


def power(
    spread: Variances,
    difference: float,
    *,
    prompts: int,
    seeds: tuple[int, int] = (1, 1),
    confidence: float = 0.95,
) -> float:
    """Return how often `paired_difference` would find a difference.

    Args:
        spread: What the difference varies with, see `lrlhf.statistics.paired.variances`.
        difference: The true difference.
        prompts: At least 2.
        seeds: Of each side.
        confidence: One minus the level of the test.

    Returns:
        0 where so few prompts can show nothing, see `fewest_prompts`.
    """
    variance = spread.of_mean(prompts, seeds)
    if (max(seeds) == 1 or variance == 0) and prompts < fewest_prompts(confidence):
        return 0.0
    if variance == 0:
        return float(difference != 0)
    return t_test_power(
        abs(difference) / math.sqrt(variance), _degrees(spread, prompts, seeds), confidence
    )


def fewest_prompts(confidence: float = 0.95) -> int:
    """Return with how many prompts a test of signs can find anything: 2 / 2^N ≤ 1 - confidence."""
    return math.ceil(1 - math.log2(1 - confidence))


def detectable_difference(
    spread: Variances, *, prompts: int, seeds: tuple[int, int] = (1, 1), wanted: float = 0.8
) -> float:
    """Return the smallest difference that is found with the power ``wanted``.

    Infinity where none is, because the prompts are too few, see `fewest_prompts`.
    """
    low, high = 0.0, math.sqrt(spread.of_mean(prompts, seeds))
    if max(seeds) == 1 and prompts < fewest_prompts():
        return math.inf
    while high > 0 and power(spread, high, prompts=prompts, seeds=seeds) < wanted:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        found = power(spread, middle, prompts=prompts, seeds=seeds) >= wanted
        low, high = (low, middle) if found else (middle, high)
    return high


def prompts_needed(
    spread: Variances, difference: float, *, seeds: tuple[int, int] = (1, 1), wanted: float = 0.8
) -> int | None:
    """Return how many prompts find a difference with the power ``wanted``.

    None: not even ten million do, because the seeds vary too much.
    """
    return _smallest(
        lambda count: power(spread, difference, prompts=count, seeds=seeds) >= wanted,
        _MOST_PROMPTS,
    )


def seeds_needed(
    spread: Variances, difference: float, *, prompts: int, wanted: float = 0.8
) -> int | None:
    """Return how many seeds of each side find a difference with the power ``wanted``.

    None: not even a thousand do, because so few prompts do not tell.
    """
    return _smallest(
        lambda count: power(spread, difference, prompts=prompts, seeds=(count, count)) >= wanted,
        _MOST_SEEDS,
    )


def _degrees(spread: Variances, prompts: int, seeds: tuple[int, int]) -> float:
    """Return the degrees of freedom that `paired_difference` is to expect."""
    sides = list(zip(spread.seeds, spread.residual, seeds, strict=True))
    parts = [
        ((seed + rest / prompts) / count, count - 1) for seed, rest, count in sides if count > 1
    ]
    of_prompts = spread.prompts + math.fsum(rest / count for _, rest, count in sides)
    parts.append((of_prompts / prompts, prompts - 1))
    squares = math.fsum(part**2 / degrees for part, degrees in parts)
    return max(1.0, spread.of_mean(prompts, seeds) ** 2 / squares)


def _smallest(enough: Callable[[int], bool], most: int) -> int | None:
    """Return the smallest number from 2 on that is enough."""
    high = 2
    while not enough(high):
        if high >= most:
            return None
        high = min(2 * high, most)
    low = max(2, high // 2)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return high
