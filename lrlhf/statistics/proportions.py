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
