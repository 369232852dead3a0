"""Simulations: errors are as rare, and differences found as often, as is claimed.

``pytest -s`` prints the figures of docs/comparing.md.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lrlhf.statistics import paired_difference, power, prompts_needed, seeds_needed, variances
from tests.matrices import few_of

Scores = NDArray[np.float64]


def tell(figures: str) -> None:
    sys.stdout.write(f"{figures}\n")


def answers(
    generator: np.random.Generator,
    count: int,
    *,
    seeds: int = 1,
    gain: float = 0.0,
    seed_spread: float = 0.0,
    own_taste: float = 0.0,
    difficulty: Scores | None = None,
) -> Scores:
    """Right and wrong answers, [seeds, count], whose expected share grows by ``gain``.

    Args:
        generator: Draws.
        count: Prompts.
        seeds: Runs.
        gain: Of every prompt's probability.
        seed_spread: Standard deviation of that of a seed.
        own_taste: Of the side, from prompt to prompt.
        difficulty: Probability of each prompt, shared by the sides.
    """
    chance = np.full(count, 0.5) if difficulty is None else difficulty
    chance = chance + own_taste * generator.choice([-1.0, 1.0], count)
    shift = gain + generator.normal(0.0, seed_spread, (seeds, 1)) if seed_spread else gain
    return (generator.random((seeds, count)) < chance + shift).astype(float)


def difficulties(generator: np.random.Generator, count: int) -> Scores:
    return generator.choice([0.1, 0.3, 0.5, 0.7, 0.9], count)


def within(share: float, expected: float, trials: int) -> bool:
    """Whether a simulated share is what is expected, within three standard errors."""
    return abs(share - expected) < 3 * math.sqrt(expected * (1 - expected) / trials)


def at_most(share: float, limit: float, trials: int) -> bool:
    return share < limit + 3 * math.sqrt(limit * (1 - limit) / trials)


@pytest.mark.parametrize("count", few_of([64, 500], [64]))
@pytest.mark.parametrize("similar", [False, True])
def test_two_checkpoints_that_are_equal_are_told_apart_in_five_percent(
    count: int, similar: bool
) -> None:
    generator = np.random.default_rng(count)
    trials, found = 2000, 0
    for _ in range(trials):
        chance = difficulties(generator, count)
        a, b = (answers(generator, count, difficulty=chance) for _ in range(2))
        if similar:  # nine answers in ten are the same
            b = np.where(generator.random(b.shape) < 0.9, a, b)
        found += paired_difference(a, b).p_value <= 0.05
    tell(f"A/A n={count} similar={similar}: {found / trials:.4f}")
    assert at_most(found / trials, 0.05, trials)


def bootstrap_rejects(a: Scores, b: Scores, generator: np.random.Generator) -> bool:
    """Resample the seeds of each side, and look at the percentiles of the difference."""
    means = [
        side.mean(axis=1)[generator.integers(len(side), size=(2000, len(side)))].mean(axis=1)
        for side in (a, b)
    ]
    low, high = np.quantile(means[1] - means[0], [0.025, 0.975])
    return not low <= 0 <= high


@pytest.mark.parametrize(
    "spread", few_of([(0.0, 0.0), (0.03, 0.0), (0.08, 0.0), (0.08, 0.2)], [(0.0, 0.0), (0.08, 0.2)])
)
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_two_recipes_that_are_equal_are_told_apart_in_five_percent(
    seeds: int, spread: tuple[float, float]
) -> None:
    seed_spread, own_taste = spread
    generator = np.random.default_rng(seeds)
    trials, found = 600, 0
    for _ in range(trials):
        a, b = (
            answers(generator, 300, seeds=seeds, seed_spread=seed_spread, own_taste=own_taste)
            for _ in range(2)
        )
        found += paired_difference(a, b).p_value <= 0.05
    tell(f"A/A {seeds} seeds ±{seed_spread}, taste {own_taste}: {found / trials:.3f}")
    assert at_most(found / trials, 0.05, trials)


def test_with_three_seeds_simpler_ways_are_wrong() -> None:
    generator = np.random.default_rng(0)
    trials = 300
    found = np.zeros(3)
    for _ in range(trials):
        a, b = (answers(generator, 300, seeds=3, seed_spread=0.05) for _ in range(2))
        of_prompts = paired_difference(a.mean(axis=0), b.mean(axis=0)).p_value <= 0.05
        ours = paired_difference(a, b).p_value <= 0.05
        found += [ours, bootstrap_rejects(a, b, generator), of_prompts]
    shares = found / trials
    tell(f"A/A 3 seeds ±0.05, n=300: ours {shares[0]:.3f}, bootstrap of seeds {shares[1]:.3f}, "
          f"prompts only {shares[2]:.3f}")  # fmt: skip
    assert at_most(shares[0], 0.05, trials)
    assert shares[1] > 0.1
    assert shares[2] > 0.3


def paired_binary(generator: np.random.Generator, count: int) -> tuple[Scores, Scores]:
    chance = difficulties(generator, count)
    a = answers(generator, count, difficulty=chance)
    return a, answers(generator, count, gain=0.08, difficulty=chance)


def paired_skewed(generator: np.random.Generator, count: int) -> tuple[Scores, Scores]:
    """Log-normal scores, a few of which are large; the second are larger by 0.3 on average."""
    shared = generator.normal(0.0, 0.8, count)
    a, b = (np.exp(shared + generator.normal(0.0, 0.6, count)) for _ in range(2))
    mean = math.exp((0.8**2 + 0.6**2) / 2)
    return a, b * (1 + 0.3 / mean)


@pytest.mark.parametrize("count", few_of([64, 500], [64]))
@pytest.mark.parametrize(("pair", "gain"), [(paired_binary, 0.08), (paired_skewed, 0.3)])
def test_intervals_hold_the_truth_in_95_percent(count: int, pair: Any, gain: float) -> None:
    generator = np.random.default_rng(count)
    trials = 600 if pair is paired_binary else 250
    held = 0
    for _ in range(trials):
        found = paired_difference(*pair(generator, count))
        held += found.low <= gain <= found.high
    tell(f"coverage n={count} {pair.__name__}: {held / trials:.3f}")
    assert 0.93 - 3 * math.sqrt(0.05 * 0.95 / trials) < held / trials
    assert held / trials < 0.97 + 3 * math.sqrt(0.05 * 0.95 / trials)


def test_five_points_are_found_as_often_as_is_claimed() -> None:
    generator = np.random.default_rng(7)
    a, b = paired_binary(generator, 20_000)
    needed = prompts_needed(variances(a, b), 0.05)
    assert needed is not None
    found = 0
    for _ in range(400):
        chance = difficulties(generator, needed)
        sides = (answers(generator, needed, gain=g, difficulty=chance) for g in (0.0, 0.05))
        found += paired_difference(*sides).p_value <= 0.05
    tell(f"5 points with {needed} prompts: found in {found / 400:.3f}")
    assert within(found / 400, 0.8, 400)


@pytest.mark.parametrize(("seeds", "seed_spread"), [(3, 0.01), (3, 0.03), (5, 0.03)])
def test_power_with_several_seeds_is_as_claimed(seeds: int, seed_spread: float) -> None:
    generator = np.random.default_rng(seeds)
    many = [
        answers(generator, 2000, seeds=200, seed_spread=seed_spread, own_taste=0.2)
        for _ in range(2)
    ]
    spread = variances(*many)
    claimed = power(spread, 0.08, prompts=500, seeds=(seeds, seeds))
    trials, found = 500, 0
    for _ in range(trials):
        sides = (
            answers(generator, 500, seeds=seeds, seed_spread=seed_spread, own_taste=0.2, gain=g)
            for g in (0.0, 0.08)
        )
        found += paired_difference(*sides).p_value <= 0.05
    tell(f"8 points, {seeds} seeds ±{seed_spread}: claimed {claimed:.3f}, {found / trials:.3f}")
    assert abs(found / trials - claimed) < 0.08


def test_variances_are_found_again() -> None:
    generator = np.random.default_rng(2)
    of_prompts, of_seeds, rest = 0.3, 0.1, 0.5
    effect = generator.normal(0.0, of_prompts, 3000)
    a, b = (
        generator.normal(0.0, of_seeds, (60, 1))
        + generator.normal(0.0, rest, (60, 3000))
        + sign * effect / 2
        for sign in (-1, 1)
    )
    found = variances(a, b)
    assert found.prompts == pytest.approx(of_prompts**2, rel=0.1)
    assert found.seeds == pytest.approx((of_seeds**2, of_seeds**2), rel=0.5)
    assert found.residual == pytest.approx((rest**2, rest**2), rel=0.02)


def test_what_is_needed_is_the_smallest_number_that_is_enough() -> None:
    generator = np.random.default_rng(4)
    a, b = (answers(generator, 300, seeds=4, seed_spread=0.05) for _ in range(2))
    spread = variances(a, b)
    seeds = seeds_needed(spread, 0.1, prompts=300)
    assert seeds is not None
    assert power(spread, 0.1, prompts=300, seeds=(seeds, seeds)) >= 0.8
    assert power(spread, 0.1, prompts=300, seeds=(seeds - 1, seeds - 1)) < 0.8
    prompts = prompts_needed(variances(a[0], b[0]), 0.1)
    assert prompts is not None
    assert power(variances(a[0], b[0]), 0.1, prompts=prompts) >= 0.8
    assert power(variances(a[0], b[0]), 0.1, prompts=prompts - 1) < 0.8
    # two seeds that differ by ten points each: no number of prompts shows one point
    assert prompts_needed(spread._replace(seeds=(0.01, 0.01)), 0.01, seeds=(2, 2)) is None
    # what prompts vary by themselves no seeds can mend
    assert seeds_needed(spread._replace(prompts=1.0), 0.01, prompts=100) is None
