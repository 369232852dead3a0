"""The difference between two sides over the same prompts, each side with one seed or several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lrlhf.statistics.estimate import Estimate
from lrlhf.statistics.sign_flips import check_confidence, mean_by_sign_flips
from lrlhf.statistics.student_t import t_quantile, two_sided_p

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
    found = _mean_squares(sides[1].mean(axis=0) - sides[0].mean(axis=0), sides)
    several = iter(zip(found.seeds, found.residual, strict=True))
    seeds, residual = [], []
    for side in sides:
        (of_means, _), rest = next(several) if len(side) > 1 else ((0.0, 0), 0.0)
        seeds.append(max(0.0, of_means - rest) * len(side))
        residual.append(rest * len(side) * count)
    prompts = max(0.0, found.prompts - math.fsum(found.residual)) * count
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
    found = _mean_squares(effects, sides)
    error = math.sqrt(found.variance)
    if error <= _CLOSE * max(float(np.abs(side).max()) for side in sides):
        # nothing varies, however few the prompts are: only their signs still say something
        return mean_by_sign_flips(effects, confidence=confidence)
    reach = t_quantile(confidence, found.degrees) * error
    return Estimate(mean, mean - reach, mean + reach, two_sided_p(mean / error, found.degrees))


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
