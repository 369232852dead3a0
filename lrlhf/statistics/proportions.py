"""Shares of a whole, with intervals."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import NamedTuple

from lrlhf.statistics.student_t import t_quantile


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
    whole, alone = all(outcome in (0, 1) for outcome in outcomes), len(gaps) == count
    effective = float(len(gaps))
    # the variance of independent outcomes is p (1 - p), and is not estimated
    if not (whole and alone) and 0 < share < 1 and len(gaps) > 1:
        squares = math.fsum((gap / (count - sizes[one])) ** 2 for one, gap in gaps.items())
        variance = squares * (len(gaps) - 1) / len(gaps)
        # a sum that rounding alone keeps from zero
        if variance > 1e-15:
            z = NormalDist().inv_cdf((1 + level) / 2)
            degrees = count**2 / sum(size * size for size in sizes.values()) - 1
            shrunk = (z / t_quantile(level, max(1.0, degrees))) ** 2
            found = (1 + share * (1 - share) / variance) * shrunk
            # that of independent numbers between 0 and 1 is p (1 - p) at most
            effective = max(effective, found) if alone else found
        elif whole:
            effective = float(count)
        if whole:
            effective = min(effective, float(count))
    return wilson_interval(share * effective, effective, level)
