"""The mean of a sample and its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from lrlhf.statistics.student_t import t_quantile


class MeanInterval(NamedTuple):
    """A mean with its confidence interval."""

    mean: float
    low: float
    """NaN, as ``high``, where a single cluster says nothing of the spread."""
    high: float
    number: int
    """Of independent clusters."""


def mean_interval(
    values: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    confidence: float = 0.95,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> MeanInterval:
    """Return the mean of values and its interval, NaN where there is no value.

    The interval is Student's, with the standard error of clustered values:

        SE² = G / (G - 1) · Σ_g (Σ_i (x_gi - x̄))² / N²

    Of a share, whose bounds are 0 and 1, it is Wilson's score interval where all values of each
    cluster are 0, or all are 1: that does not shrink to a point when all answers are right.

    Args:
        values: NaN is left out.
        clusters: What each value belongs to, such as its prompt: values of one cluster depend on
            each other. None: all are independent.
        confidence: Share of such intervals that hold the true mean.
        bounds: Least and largest mean that there can be; the interval ends there.

    Raises:
        ValueError: ``confidence`` does not lie between 0 and 1, or there is not one cluster for
            each value.

    Reference:
        Miller 2024, eq. 4, https://arxiv.org/abs/2411.00640; Wilson 1927,
        https://doi.org/10.1080/01621459.1927.10502953
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; it must lie between 0 and 1")
    given = np.asarray(values, dtype=np.float64)
    names: Sequence[Hashable] = range(len(given)) if clusters is None else clusters
    if len(names) != len(given):
        raise ValueError(f"{len(given)} values and {len(names)} clusters: give each value its own")
    groups: dict[Hashable, list[float]] = {}
    for name, value in zip(names, given.tolist(), strict=True):
        if not math.isnan(value):
            groups.setdefault(name, []).append(value)
    count = len(groups)
    if not count:
        return MeanInterval(math.nan, math.nan, math.nan, 0)
    # exact sums, which do not depend on the order of the values
    total = sum(map(len, groups.values()))
    mean = math.fsum(value for own in groups.values() for value in own) / total
    agreed = all(own in ([0.0] * len(own), [1.0] * len(own)) for own in groups.values())
    if agreed and bounds == (0, 1):
        return MeanInterval(mean, *_wilson(mean, count, confidence), count)
    if count == 1:
        return MeanInterval(mean, math.nan, math.nan, 1)
    gaps = [math.fsum(value - mean for value in own) for own in groups.values()]
    error = math.sqrt(math.fsum(gap * gap for gap in gaps) * count / (count - 1)) / total
    reach = t_quantile(confidence, count - 1) * error
    low, high = max(bounds[0], mean - reach), min(bounds[1], mean + reach)
    return MeanInterval(mean, low, high, count)


def _wilson(share: float, count: int, confidence: float) -> tuple[float, float]:
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    scale = 1 + z**2 / count
    center = share + z**2 / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)
