"""The mean of a sample and its confidence interval."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_ORDER = 96
_NORMAL = NormalDist()


def two_sided_p(t: float, degrees: float) -> float:
    """Return the probability of a value as far from zero as ``t``, or farther.

        P(|T| > t) = 1 - 2 Γ((ν + 1) / 2) / (√π Γ(ν / 2)) ∫₀^θ cos^(ν - 1) φ dφ,  t = √ν tan θ

    Args:
        t: The value; its sign does not matter.
        degrees: Of freedom, ν, at least 1.

    Reference:
        Abramowitz and Stegun 1964, 26.7.1, with the substitution above
    """
    return max(0.0, 1.0 - _within(math.atan(abs(t) / math.sqrt(degrees)), degrees))


@cache
def t_quantile(confidence: float, degrees: float) -> float:
    """Return the t that ``confidence`` of all values stay below in size.

    Args:
        confidence: Between 0 and 1, such as 0.95.
        degrees: Of freedom, at least 1.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def t_test_power(effect: float, degrees: float, confidence: float) -> float:
    """Return how often a two-sided t test finds an effect.

    The statistic is (Z + δ) / U with Z standard normal and νU² of χ² with ν degrees of freedom:
    the mean over U of Φ(δ - tU) + Φ(-δ - tU).

    Args:
        effect: δ, the effect in standard errors of its estimate.
        degrees: Of freedom of the test, ν, at least 1.
        confidence: One minus the level of the test.
    """
    t = t_quantile(confidence, degrees)
    width = 1 / math.sqrt(2 * degrees)
    scales, weights = _quadrature(max(1e-9, 1 - 9 * width), 1 + 12 * width)
    log_density = (
        math.log(2)
        + degrees / 2 * math.log(degrees / 2)
        - math.lgamma(degrees / 2)
        + (degrees - 1) * np.log(scales)
        - degrees * scales**2 / 2
    )
    terms = [
        _NORMAL.cdf(effect - t * scale) + _NORMAL.cdf(-effect - t * scale)
        for scale in scales.tolist()
    ]
    return float(np.exp(log_density) * weights @ np.array(terms))


def _within(angle: float, degrees: float) -> float:
    """Return P(|T| ≤ √ν tan(angle))."""
    # beyond so many standard deviations there is nothing, and the nodes would miss the peak
    angles, weights = _quadrature(0.0, min(angle, 9 / math.sqrt(degrees)))
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2))
    return float(2 / math.sqrt(math.pi) * scale * (np.cos(angles) ** (degrees - 1) @ weights))


def _quadrature(low: float, high: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    nodes, weights = _legendre()
    return (high + low) / 2 + (high - low) / 2 * nodes, (high - low) / 2 * weights


@cache
def _legendre() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return np.polynomial.legendre.leggauss(_ORDER)


class Outcomes(NamedTuple):
    """What a share is of."""

    outcomes: Sequence[bool]
    clusters: Sequence[Hashable]
    """What each outcome belongs to; outcomes of one cluster depend on each other."""


def wilson_interval(count: float, total: float, level: float = 0.95) -> tuple[float, float]:
    """Return the score interval of a share, which lies in [0, 1] however small the sample is.

    Args:
        count: How many of the sample.
        total: Size of the sample; 0: nothing is known, and the interval is [0, 1].
        level: How often such intervals hold the true share.

    Reference:
        Wilson 1927, Journal of the American Statistical Association 22, 209-212
    """
    if total == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, weight = count / total, z * z / total
    center = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / total + weight / (4 * total))
    return max(0.0, center - half), min(1.0, center + half)


def unseen_share(total: int, level: float = 0.95) -> float:
    """Return how large a share can be of which a sample of ``total`` shows nothing.

        1 - (1 - level)^(1 / n), about 3 / n of many: the rule of three

    Args:
        total: Size of the sample, at least 1.
        level: How often a larger share would show.

    Reference:
        Clopper and Pearson 1934, https://doi.org/10.1093/biomet/26.4.404, of zero successes,
        one-sided
    """
    return float(1 - (1 - level) ** (1 / total))


def share_interval(
    outcomes: Sequence[float], clusters: Sequence[Hashable], level: float = 0.95
) -> tuple[float, float]:
    """Return the interval of a share of outcomes that depend on each other within clusters.

    It is Wilson's of so many independent outcomes as say as much as these:

        n* = min(n, (1 + p (1 - p) / SE²) (z / t)²)
        SE² = (G - 1) / G · Σ_g (Σ_i (x_gi - p) / (n - n_g))²

    with SE of the jackknife over the clusters, and Student's t of n² / Σ_g n_g² - 1 degrees of
    freedom: clusters that are large say little of the spread. With equal clusters SE is that of
    `mean_interval`, and there are G - 1. n* is n with one outcome in each cluster, and G where all
    outcomes are the same.

    Args:
        outcomes: What the share is of; also numbers from 0 to 1, such as shares of samples.
        clusters: What each outcome belongs to, such as its prompt.
        level: How often such intervals hold the true share.

    Raises:
        ValueError: There is not one cluster for each outcome.

    Reference:
        Franco, Little, Louis and Slud 2019, https://doi.org/10.1093/jssam/smy019 (Wilson's interval
        with the effective sample size); Korn and Graubard 1998, Survey Methodology 24, 193-201 (t);
        Cameron and Miller 2015, section VI, Journal of Human Resources 50 (jackknife, and clusters
        of different size)
    """
    count = len(outcomes)
    if not count:
        return wilson_interval(0, 0, level)
    share = math.fsum(outcomes) / count
    gaps: dict[Hashable, float] = defaultdict(float)
    sizes: dict[Hashable, int] = defaultdict(int)
    for outcome, cluster in zip(outcomes, clusters, strict=True):
        gaps[cluster] += outcome - share
        sizes[cluster] += 1
    binary, alone = all(outcome in (0, 1) for outcome in outcomes), len(gaps) == count
    effective = float(len(gaps))
    # the variance of independent outcomes is p (1 - p), and is not estimated
    if not (binary and alone) and 0 < share < 1 and len(gaps) > 1:
        squares = math.fsum((gap / (count - sizes[one])) ** 2 for one, gap in gaps.items())
        variance = squares * (len(gaps) - 1) / len(gaps)
        # a sum that rounding alone keeps from zero
        if variance > 1e-15:
            z = NormalDist().inv_cdf((1 + level) / 2)
            degrees = count**2 / sum(size * size for size in sizes.values()) - 1
            shrunk = (z / t_quantile(level, max(1.0, degrees))) ** 2
            center = (1 + share * (1 - share) / variance) * shrunk
            # that of independent numbers between 0 and 1 is p (1 - p) at most
            effective = max(effective, center) if alone else center
        elif binary:
            effective = float(count)
        if binary:
            effective = min(effective, float(count))
    return wilson_interval(share * effective, effective, level)


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
    sample = np.asarray(values, dtype=np.float64)
    names: Sequence[Hashable] = range(len(sample)) if clusters is None else clusters
    if len(names) != len(sample):
        raise ValueError(f"{len(sample)} values and {len(names)} clusters: give each value its own")
    groups: dict[Hashable, list[float]] = {}
    for name, value in zip(names, sample.tolist(), strict=True):
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
