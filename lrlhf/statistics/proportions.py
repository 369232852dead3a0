"""Shares of a whole, with intervals."""

from __future__ import annotations

import math
from statistics import NormalDist


def wilson_interval(count: int, total: int, level: float = 0.95) -> tuple[float, float]:
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
