"""Rank correlations, with intervals that know which values belong together."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MOST_BLOCKS, _FEWEST_BLOCKS = 40, 10


class Correlation(NamedTuple):
    """A coefficient and its 95 % interval; NaN where one of the sides does not vary."""

    value: float
    low: float
    """NaN too where there are fewer than ten groups."""
    high: float
    pairs: int
    """Of values that both sides have."""


def ranks(values: ArrayLike) -> NDArray[np.float64]:
    """Return the rank of each value `[N]`, from 1; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse], dtype=np.float64)


def spearman(first: ArrayLike, second: ArrayLike) -> float:
    """Return Spearman's rank correlation; NaN where one side does not vary."""
    one, two = ranks(first), ranks(second)
    one, two = one - one.mean(), two - two.mean()
    scale = math.sqrt(float(one @ one) * float(two @ two))
    return float(one @ two) / scale if scale > 0 else math.nan


def spearman_interval(
    first: ArrayLike, second: ArrayLike, groups: Sequence[Hashable], level: float = 0.95
) -> Correlation:
    """Return Spearman's rank correlation, with an interval for values that come in groups.

    Responses to one prompt resemble each other, so that they say less than as many independent
    ones. The interval is of the jackknife that leaves out one block of groups at a time (up to 40
    blocks), on Fisher's scale z = artanh(r).

    Args:
        first: One side `[N]`; pairs with NaN do not count.
        second: The other side `[N]`.
        groups: To which group each pair belongs, `N` of them.
        level: How often such intervals hold the true correlation.

    Reference:
        Efron and Stein 1981, The Annals of Statistics 9(3), 586-596
    """
    one, two = np.asarray(first, np.float64), np.asarray(second, np.float64)
    known = ~(np.isnan(one) | np.isnan(two))
    numbers: dict[Hashable, int] = {}
    group = np.array([numbers.setdefault(key, len(numbers)) for key in groups], int)[known]
    one, two = one[known], two[known]
    value = spearman(one, two) if len(one) > 1 else math.nan
    there = np.unique(group)
    blocks = min(_MOST_BLOCKS, len(there))
    if math.isnan(value) or blocks < _FEWEST_BLOCKS:
        return Correlation(value, math.nan, math.nan, len(one))
    block = np.searchsorted(there, group) % blocks
    left = [spearman(one[block != b], two[block != b]) for b in range(blocks)]
    scores = np.array([_fisher(r) for r in left if not math.isnan(r)])
    spread = math.sqrt(
        (len(scores) - 1) / len(scores) * float(((scores - scores.mean()) ** 2).sum())
    )
    half = NormalDist().inv_cdf((1 + level) / 2) * spread
    center = _fisher(value)
    return Correlation(value, math.tanh(center - half), math.tanh(center + half), len(one))


def _fisher(r: float) -> float:
    return math.atanh(max(-1 + 1e-12, min(1 - 1e-12, r)))
