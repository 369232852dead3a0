"""The mean of differences between two fixed things, over cases that are drawn at random."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lrlhf.statistics.estimate import Estimate

_SUBSETS, _SUBSETS_OF_MANY = 9999, 1999
_MANY = 4000
"""Different values from which on fewer subsets are drawn: the quantiles need as many no more."""
_AT_ONCE = 2_000_000
"""Numbers in memory."""


def mean_by_sign_flips(differences: ArrayLike, *, confidence: float = 0.95) -> Estimate:
    """Return the mean of paired differences, its interval, and the test of zero.

    The test compares the mean with the means after random changes of signs. It is exact where the
    two sides can be exchanged (A/A), for any number of cases and any distribution: with binary
    scores it is McNemar's exact test. The interval holds the means that the same test does not
    reject. Its ends are quantiles of the means of random subsets: changing the signs of a subset S
    of x - δ brings its mean to that of x - δ or above exactly where δ is at least the mean over S.

    A bootstrap of percentiles, and Student's t, reject too often where few of the differences are
    not zero, as in an evaluation of two similar checkpoints by right and wrong.

    Args:
        differences: One per independent case, [N]; their order does not matter.
        confidence: Share of such intervals that hold the true mean.

    Raises:
        ValueError: There are none, one is not finite, or ``confidence`` is not between 0 and 1.

    Reference:
        Hartigan 1969, https://doi.org/10.1080/01621459.1969.10501057 (the interval); Phipson and
        Smyth 2010, https://doi.org/10.2202/1544-6115.1585 (p-values of random permutations)
    """
    values = np.asarray(differences, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError("differences are one finite number per case, and at least one")
    check_confidence(confidence)
    mean = math.fsum(values) / len(values)
    means, empty = _subset_means(values)
    # the sum of the differences themselves is one of the sums
    tails = empty + 1
    room = 1e-9 * float(np.abs(values).max())
    below, above = ((means <= room).sum() + tails, (means >= -room).sum() + tails)
    rounds = len(means) + empty + 1
    # so many subset means lie outside at each end
    outside = math.floor((1 - confidence) / 2 * rounds + 1e-9) - tails
    low, high = -math.inf, math.inf
    if outside >= 0:
        ordered = np.sort(means)
        low, high = float(ordered[outside]), float(ordered[-1 - outside])
    return Estimate(mean, low, high, min(1.0, 2 * float(min(below, above)) / rounds))


def check_confidence(confidence: float) -> None:
    """Refuse what is no share.

    Raises:
        ValueError: It does not lie between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; it must lie between 0 and 1")


def _subset_means(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    """Return the means of random subsets, each value in half of them, and how many were empty.

    Equal values are drawn together, so that neither their order nor that of the cases matters.
    """
    different, counts = np.unique(values, return_counts=True)
    left = _SUBSETS if len(different) <= _MANY else _SUBSETS_OF_MANY
    generator = np.random.default_rng(0)
    sums, sizes = [], []
    while left:
        rows = min(left, max(1, _AT_ONCE // len(different)))
        drawn = _halves(generator, counts, rows)
        sums.append(drawn @ different)
        sizes.append(drawn.sum(axis=1))
        left -= rows
    total, size = np.concatenate(sums), np.concatenate(sizes)
    return total[size > 0] / size[size > 0], int((size == 0).sum())


def _halves(
    generator: np.random.Generator, counts: NDArray[np.int64], rows: int
) -> NDArray[np.float64]:
    """Draw each of so many equal values or leave it, both with probability one half."""
    if counts.max() > 1:
        return generator.binomial(counts, 0.5, size=(rows, len(counts))).astype(np.float64)
    # the same, ten times as fast
    coins = generator.integers(256, size=(rows, -(-len(counts) // 8)), dtype=np.uint8)
    return np.unpackbits(coins, axis=1, count=len(counts)).astype(np.float64)
