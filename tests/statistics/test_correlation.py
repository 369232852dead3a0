"""Rank correlations against another implementation, and intervals that hold what they promise."""

import math

import numpy as np
import pytest
from scipy import stats

from lrlhf.statistics.correlation import ranks, spearman, spearman_interval
from lrlhf.statistics.intervals import wilson_interval


def test_equal_values_share_their_mean_rank() -> None:
    assert ranks([30, 10, 20, 10]).tolist() == [4.0, 1.5, 3.0, 1.5]


def test_the_coefficient_is_that_of_scipy() -> None:
    random = np.random.default_rng(0)
    one = random.integers(0, 9, 100)
    two = one + random.integers(0, 12, 100)

    assert spearman(one, two) == pytest.approx(stats.spearmanr(one, two).statistic, abs=1e-12)
    assert spearman(one, np.exp(one)) == pytest.approx(1.0)
    assert math.isnan(spearman(one, np.zeros(100)))


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    truth = 6 / math.pi * math.asin(0.5 / 2)  # Spearman's of a normal pair with r = 0.5
    hits = 0
    for _ in range(300):
        one = random.normal(size=200)
        two = 0.5 * one + math.sqrt(0.75) * random.normal(size=200)
        found = spearman_interval(one, two, range(200))
        hits += found.low <= truth <= found.high

    # 285 of 300 expected, with a standard deviation of 3.8
    assert 270 <= hits <= 297


def test_responses_that_repeat_their_group_make_the_interval_no_narrower() -> None:
    random = np.random.default_rng(2)
    one, two = random.normal(size=(2, 60))

    alone = spearman_interval(one, two, range(60))
    repeated = spearman_interval(np.repeat(one, 5), np.repeat(two, 5), np.repeat(range(60), 5))

    assert repeated[:3] == pytest.approx(alone[:3])
    assert (alone.pairs, repeated.pairs) == (60, 300)


def test_nan_does_not_count_and_few_groups_give_no_interval() -> None:
    one, two = np.arange(12.0), np.arange(12.0) ** 2
    one[3] = math.nan

    found = spearman_interval(one, two, range(12))
    few = spearman_interval(one, two, [0] * 12)

    assert (found.value, found.pairs) == (pytest.approx(1.0), 11)
    assert found.low == pytest.approx(1.0)
    assert few.value == pytest.approx(1.0)
    assert math.isnan(few.low)


def test_the_interval_of_a_share_is_that_of_scipy() -> None:
    for count, total in ((0, 10), (3, 10), (57, 100), (1, 1)):
        wanted = stats.binomtest(count, total).proportion_ci(method="wilson")
        assert wilson_interval(count, total) == pytest.approx((wanted.low, wanted.high), abs=1e-9)
    assert wilson_interval(0, 0) == (0.0, 1.0)
