"""The difference between two sides over the same prompts, each side with one seed or several."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lrlhf.statistics.intervals import Estimate, t_quantile, t_test_power, two_sided_p

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


Scores = NDArray[np.float64]
_CLOSE = 1e-9
"""Relative difference that rounding may make of two means."""


class Wins(NamedTuple):
    """How often side B does better than side A on the same prompt; the shares sum to one."""

    wins: float
    ties: float
    losses: float
    net: Estimate
    """Wins less losses."""


class Variances(NamedTuple):
    """What the difference between two sides varies with.

    The mean over ``N`` prompts and ``S`` seeds of each side has the variance

        prompts / N + Σ_sides (seeds / S + residual / (S N))
    """

    prompts: float
    """Of the effect, from prompt to prompt; of one seed per side all that varies."""
    seeds: tuple[float, float]
    """Of the mean score from seed to seed, of each side; 0: one seed, which is all there is."""
    residual: tuple[float, float]
    """What is left: of a prompt's score from seed to seed, of each side."""

    def of_mean(self, prompts: int, seeds: Sequence[int]) -> float:
        """Return the variance of the mean over so many prompts and seeds of each side."""
        sides = zip(self.seeds, self.residual, seeds, strict=True)
        return self.prompts / prompts + math.fsum(
            (seed + rest / prompts) / count for seed, rest, count in sides
        )


class _MeanSquares(NamedTuple):
    """Estimated variances of the mean difference, each from one way to look at the scores."""

    prompts: float
    """From prompts alone."""
    seeds: list[tuple[float, int]]
    """From the seeds of each side that has several, and its degrees of freedom."""
    residual: list[float]
    """Of each of these sides: what the two above have in common."""
    num_prompts: int
    """Prompts."""

    @property
    def variance(self) -> float:
        seeds = math.fsum(part for part, _ in self.seeds)
        both = self.prompts + seeds - math.fsum(self.residual)
        return max(self.prompts, seeds, both)

    @property
    def degrees(self) -> float:
        parts = [*self.seeds, (self.prompts, self.num_prompts - 1)]
        spread = math.fsum(part**2 / degrees for part, degrees in parts)
        # a square as small as that of 1e-170 is zero
        return max(1.0, self.variance**2 / spread) if spread > 0 else 1.0


def paired_difference(a: ArrayLike, b: ArrayLike, *, confidence: float = 0.95) -> Estimate:
    """Return the mean of ``b - a`` over prompts that both sides have answered.

    With one seed per side the two models are fixed and the prompts are a sample: the interval is
    that of `mean_by_sign_flips`. It says nothing of what another seed would give.

    With several seeds the seeds of a side, and the prompts, are samples. Scores vary with prompt,
    with seed, and with both together. The variance of the mean is estimated from the means of the
    seeds and from the differences of the prompts, less what is in both, and at least as the larger
    of the two; the interval is Student's with Satterthwaite's degrees of freedom. A bootstrap over
    three seeds rejects far too often, and no permutation of three against three reaches 5 %. A side
    with a single seed is a fixed model.

    Args:
        a: Scores of side A, [S, N] or [N]: a row per seed, a column per prompt. The samples of a
            prompt are averaged: they are no further prompts.
        b: Of side B, with the same prompts in the same order.
        confidence: Share of such intervals that hold the true difference.

    Raises:
        ValueError: The shapes do not fit, or a score is not finite.

    Reference:
        Miller 2024, https://arxiv.org/abs/2411.00640 (pairs and clusters); Satterthwaite 1946,
        https://doi.org/10.2307/3002019; Owen 2007, https://doi.org/10.1214/07-AOAS122 (seeds
        crossed with prompts); Colas et al. 2019, https://arxiv.org/abs/1904.06979 (few seeds)
    """
    sides = checked_sides(a, b)
    return _estimate(sides[1].mean(axis=0) - sides[0].mean(axis=0), sides, confidence)


def wins(a: ArrayLike, b: ArrayLike, *, confidence: float = 0.95) -> Wins:
    """Return how often side B has a higher score on a prompt than side A.

    Every seed of B meets every seed of A. The interval treats seeds as `paired_difference` does.

    Args:
        a: Scores of side A, [S, N] or [N].
        b: Of side B.
        confidence: Share of such intervals that hold the true net share of wins.

    Raises:
        ValueError: The shapes do not fit, or a score is not finite.
    """
    first, second = checked_sides(a, b)
    against, own = first[None], second[:, None]
    gaps = np.where(np.isclose(own, against, rtol=_CLOSE, atol=0), 0.0, np.sign(own - against))
    # each side's seeds vary by what they win on average against all of the other's
    sides = (-gaps.mean(axis=0), gaps.mean(axis=1))
    net = _estimate(gaps.mean(axis=(0, 1)), sides, confidence)
    return Wins(float((gaps > 0).mean()), float((gaps == 0).mean()), float((gaps < 0).mean()), net)


def variances(a: ArrayLike, b: ArrayLike) -> Variances:
    """Return what the difference between two sides varies with, see `paired_difference`.

    Raises:
        ValueError: The shapes do not fit, there is one prompt, or a score is not finite.
    """
    sides = checked_sides(a, b)
    count = sides[0].shape[1]
    if count < 2:
        raise ValueError("one prompt does not tell how prompts vary; give two or more")
    squares = _mean_squares(sides[1].mean(axis=0) - sides[0].mean(axis=0), sides)
    several = iter(zip(squares.seeds, squares.residual, strict=True))
    seeds, residual = [], []
    for side in sides:
        (of_means, _), rest = next(several) if len(side) > 1 else ((0.0, 0), 0.0)
        seeds.append(max(0.0, of_means - rest) * len(side))
        residual.append(rest * len(side) * count)
    prompts = max(0.0, squares.prompts - math.fsum(squares.residual)) * count
    return Variances(prompts, (seeds[0], seeds[1]), (residual[0], residual[1]))


def checked_sides(a: ArrayLike, b: ArrayLike) -> tuple[Scores, Scores]:
    """Return the scores of both sides as [S, N].

    Raises:
        ValueError: The shapes do not fit, or a score is not finite.
    """
    first, second = (np.atleast_2d(np.asarray(side, dtype=np.float64)) for side in (a, b))
    if first.ndim != 2 or second.ndim != 2 or first.shape[1] != second.shape[1]:
        raise ValueError(
            f"scores of shapes {first.shape} and {second.shape}: give [seeds, prompts] with the "
            "same prompts"
        )
    if not first.size or not second.size:
        raise ValueError("a side has no scores")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ValueError("a score is not finite; leave out the prompt")
    return first, second


def _estimate(effects: Scores, sides: Sequence[Scores], confidence: float) -> Estimate:
    """Return the mean of the prompts' effects, given the scores whose seeds vary."""
    if all(len(side) == 1 for side in sides):
        return mean_by_sign_flips(effects, confidence=confidence)
    check_confidence(confidence)
    mean = math.fsum(effects) / len(effects)
    if len(effects) < 2:
        return Estimate(mean, -math.inf, math.inf, 1.0)
    squares = _mean_squares(effects, sides)
    error = math.sqrt(squares.variance)
    if error <= _CLOSE * max(float(np.abs(side).max()) for side in sides):
        # nothing varies, however few the prompts are: only their signs still say something
        return mean_by_sign_flips(effects, confidence=confidence)
    reach = t_quantile(confidence, squares.degrees) * error
    return Estimate(mean, mean - reach, mean + reach, two_sided_p(mean / error, squares.degrees))


def _mean_squares(effects: Scores, sides: Sequence[Scores]) -> _MeanSquares:
    count = len(effects)
    seeds, residual = [], []
    for side in sides:
        runs = len(side)
        if runs == 1:
            continue
        of_seeds, of_prompts = side.mean(axis=1, keepdims=True), side.mean(axis=0)
        rest = side - of_seeds - of_prompts + side.mean()
        seeds.append((float(of_seeds.var(ddof=1)) / runs, runs - 1))
        residual.append(float((rest**2).sum()) / ((runs - 1) * (count - 1)) / (runs * count))
    return _MeanSquares(float(effects.var(ddof=1)) / count, seeds, residual, count)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values that take into account how many tests there are.

    The i-th smallest of n is multiplied by n - i + 1, and is no less than one before it. Rejecting
    where the result is at most 0.05 errs anywhere in at most 5 % of families, whatever depends on
    whatever.

    Args:
        p_values: Of one family of tests.

    Reference:
        Holm 1979, https://www.jstor.org/stable/4615733
    """
    adjusted = [0.0] * len(p_values)
    so_far = 0.0
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    for rank, index in enumerate(order):
        so_far = max(so_far, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = so_far
    return adjusted


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
    spread: Variances, *, prompts: int, seeds: tuple[int, int] = (1, 1), target: float = 0.8
) -> float:
    """Return the smallest difference that is found with the power ``target``.

    Infinity where none is, because the prompts are too few, see `fewest_prompts`.
    """
    low, high = 0.0, math.sqrt(spread.of_mean(prompts, seeds))
    if max(seeds) == 1 and prompts < fewest_prompts():
        return math.inf
    while high > 0 and power(spread, high, prompts=prompts, seeds=seeds) < target:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        reached = power(spread, middle, prompts=prompts, seeds=seeds) >= target
        low, high = (low, middle) if reached else (middle, high)
    return high


def prompts_needed(
    spread: Variances, difference: float, *, seeds: tuple[int, int] = (1, 1), target: float = 0.8
) -> int | None:
    """Return how many prompts find a difference with the power ``target``.

    None: not even ten million do, because the seeds vary too much.
    """
    return _smallest(
        lambda count: power(spread, difference, prompts=count, seeds=seeds) >= target, _MOST_PROMPTS
    )


def seeds_needed(
    spread: Variances, difference: float, *, prompts: int, target: float = 0.8
) -> int | None:
    """Return how many seeds of each side find a difference with the power ``target``.

    None: not even a thousand do, because so few prompts do not tell.
    """
    return _smallest(
        lambda count: power(spread, difference, prompts=prompts, seeds=(count, count)) >= target,
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
