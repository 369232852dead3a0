"""The mean of a sample and its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from lrlhf.statistics.proportions import share_interval
from lrlhf.statistics.student_t import t_quantile


class MeanInterval(NamedTuple):
    """A mean with its confidence interval."""

    mean: float
    low: float
    """NaN, as ``high``, where the values say nothing of the spread: a single one, or all equal."""
    high: float
    number: int
    """Of independent clusters."""


def mean_interval(
    values: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    confidence: float = 0.95,
    bounds: tuple[float, float] | None = None,
) -> MeanInterval:
    """Return the mean of values and its interval, NaN where there is no value.

    Between bounds it is the score interval of `share_interval`, scaled to them, which stays inside
    and does not shrink to a point when all answers are right. Otherwise it is Student's, with the
    standard error of clustered values:

        SE² = G / (G - 1) · Σ_g (Σ_i (x_gi - x̄))² / N²

    Args:
        values: NaN is left out.
        clusters: What each value belongs to, such as its prompt: values of one cluster depend on
            each other. None: all are independent.
        confidence: Share of such intervals that hold the true mean.
        bounds: Least and largest value that there can be; None: there are none.

    Raises:
        ValueError: ``confidence`` does not lie between 0 and 1, or there is not one cluster for
            each value.

    Reference:
        Miller 2024, eq. 4, https://arxiv.org/abs/2411.00640
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
    if bounds is not None:
        least, width = bounds[0], bounds[1] - bounds[0]
        members = [name for name, own in groups.items() for _ in own]
        scaled = [(value - least) / width for own in groups.values() for value in own]
        low, high = share_interval(scaled, members, confidence)
        return MeanInterval(mean, least + width * low, least + width * high, count)
    gaps = [math.fsum(value - mean for value in own) for own in groups.values()]
    squares = math.fsum(gap * gap for gap in gaps)
    if count == 1 or squares <= (1e-12 * total * mean) ** 2:  # rounding alone
        return MeanInterval(mean, math.nan, math.nan, count)
    reach = t_quantile(confidence, count - 1) * math.sqrt(squares * count / (count - 1)) / total
    return MeanInterval(mean, mean - reach, mean + reach, count)


def likely_bounds(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the least and largest value of a score whose kind is unknown.

    They are 0 and 1 where all values lie between them, and the two values where there are three or
    more and no third, such as right and wrong with a weight. None: nothing bounds them.
    """
    known = [value for value in values if not math.isnan(value)]
    least, largest = min(known, default=math.nan), max(known, default=math.nan)
    if least >= 0 and largest <= 1:
        return 0.0, 1.0
    return (least, largest) if len({*known}) == 2 < len(known) else None


class Estimate(NamedTuple):
    """A mean with its confidence interval, and the test of whether it is zero."""

    value: float
    low: float
    """Minus infinity where there are too few values for any interval."""
    high: float
    p_value: float
    """Two-sided; at most 0.05 exactly where a 95 % interval leaves zero out."""
