"""Intervals against tables, formulas written out, and simulations."""

import math

import numpy as np
import pytest

from lrlhf.statistics.intervals import likely_bounds, mean_interval


def test_a_plain_mean() -> None:
    # mean 3, variance 2.5, standard error √(2.5 / 5) = 0.70711, t(4) = 2.77645
    found = mean_interval([1, 2, 3, 4, 5])
    assert found.mean == 3
    assert found.low == pytest.approx(3 - 2.77645 * 0.70711, abs=1e-4)
    assert found.high == pytest.approx(3 + 2.77645 * 0.70711, abs=1e-4)
    assert found.number == 5
    assert mean_interval([5, math.nan, 1, 4, 2, 3]) == found


def test_repeating_each_value_makes_no_interval_narrower() -> None:
    values = [0.2, 0.9, 0.4, 0.7]
    once = mean_interval(values)
    many = mean_interval(values * 6, list("abcd") * 6)
    assert many == pytest.approx(once)
    assert mean_interval(values * 6).high < many.high


def test_clusters_of_unequal_size() -> None:
    # mean 2, sums of gaps: (1-2)+(2-2) = -1 and 1; √(2 · 2/1) / 3 = 2/3; t(1) = 12.7062
    found = mean_interval([1.0, 2.0, 3.0], ["a", "a", "b"])
    assert (found.mean, found.number) == (2.0, 2)
    assert found.high == pytest.approx(2 + 12.7062 * 2 / 3, abs=1e-3)


def test_shares_have_the_interval_of_wilson() -> None:
    # of 10 all: low is n / (n + z²) = 10 / 13.8415
    share = {"bounds": (0.0, 1.0)}
    all_right = mean_interval([1.0] * 10, **share)
    assert all_right[:3] == pytest.approx((1.0, 0.722467, 1.0), abs=1e-5)
    assert mean_interval([0.0] * 10, **share)[:3] == pytest.approx((0.0, 0.0, 0.277533), abs=1e-5)
    # 4 samples of each prompt that agree are one observation
    assert mean_interval([1.0] * 40, [row // 4 for row in range(40)], **share) == all_right
    # n = 4, p = ½: centre ½, spread z √(1/16 + z²/64) / (1 + z²/4) with z² = 3.84146
    half = mean_interval([0.0, 1.0, 1.0, 0.0], **share)
    assert half.high == pytest.approx(0.5 + 0.350014, abs=1e-4)


def test_values_that_happen_to_be_0_or_1_are_no_shares() -> None:
    # scores may be larger than 1: standard error √(1/3 / 4) = 0.288675, t(3) = 3.18245
    found = mean_interval([0.0, 1.0, 1.0, 0.0])
    assert (found.low, found.high) == pytest.approx((0.5 - 0.918694, 0.5 + 0.918694), abs=1e-5)


def test_too_little_to_say() -> None:
    assert math.isnan(mean_interval([]).mean)
    assert mean_interval([math.nan]).number == 0
    alone = mean_interval([0.3])
    assert (alone.mean, alone.number) == (0.3, 1)
    assert math.isnan(alone.low)
    alike = mean_interval([0.1 + 0.2, 0.3, 0.3])  # but for rounding
    assert alike.mean == pytest.approx(0.3)
    assert math.isnan(alike.low)
    assert math.isnan(alike.high)


@pytest.mark.parametrize(
    ("values", "bounds"),
    [
        ([1.0] * 20, (0.0, 1.0)),
        ([0.0] * 20, (0.0, 1.0)),
        ([0.5, 1.0, 1.0], (0.0, 1.0)),
        ([0.25] * 6, (0.0, 1.0)),
        ([1.2] * 19 + [0.2], (0.2, 1.2)),
        ([-2.0, -2.0, -2.0, 0.0], (-2.0, 0.0)),
        ([1.2] * 5, None),
        ([0.0, 2.0], None),
        ([0.0, 1.0, 2.0], None),
        ([], None),
    ],
)
def test_intervals_between_bounds_stay_there_and_are_no_points(
    values: list[float], bounds: tuple[float, float] | None
) -> None:
    assert likely_bounds(values) == bounds
    if bounds is not None:
        found = mean_interval(values, bounds=bounds)
        assert bounds[0] <= found.low < found.high <= bounds[1]
        assert found.low - 1e-9 <= found.mean <= found.high + 1e-9


def test_an_interval_between_other_bounds_is_that_of_a_share_on_their_scale() -> None:
    # 19 of 20 are the larger of -1 and 3: Newcombe's (p = 0.95, n = 20) is 0.7639 to 0.9911
    found = mean_interval([3.0] * 19 + [-1.0], bounds=(-1.0, 3.0))
    assert found[:3] == pytest.approx((2.8, 4 * 0.7639 - 1, 4 * 0.9911 - 1), abs=1e-3)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="confidence is 95"):
        mean_interval([1.0], confidence=95)
    with pytest.raises(ValueError, match="2 values and 1 clusters"):
        mean_interval([1.0, 2.0], ["a"])


def test_the_order_of_the_values_does_not_matter() -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=99).tolist()
    clusters = (np.arange(99) // 3).tolist()
    order = random.permutation(99)
    mixed = [values[row] for row in order], [clusters[row] for row in order]
    assert mean_interval(*mixed) == mean_interval(values, clusters)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_19_of_20_intervals_hold_the_true_mean(share: float) -> None:
    # prompts of different difficulty, 4 samples each: their values depend on each other
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(400):
        difficulty = random.beta(4 * share, 4 * (1 - share), size=40)
        values = random.binomial(1, np.repeat(difficulty, 4)).astype(float)
        found = mean_interval(values.tolist(), np.repeat(np.arange(40), 4).tolist())
        hits += found.low <= share <= found.high
    assert 0.92 <= hits / 400 <= 0.98
