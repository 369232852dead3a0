"""Estimates against enumeration and arithmetic by hand, and what must not matter to them."""

import itertools
import math

import numpy as np
import pytest

from lrlhf.statistics import holm, mean_by_sign_flips, paired_difference, variances, wins


def enumerated_p(differences: list[float]) -> float:
    """Go through all changes of signs, one by one."""
    sums = [
        math.fsum(sign * value for sign, value in zip(signs, differences, strict=True))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    own = math.fsum(differences)
    above = sum(one >= own - 1e-12 for one in sums) / len(sums)
    below = sum(one <= own + 1e-12 for one in sums) / len(sums)
    return min(1.0, 2 * min(above, below))


@pytest.mark.parametrize(
    "differences",
    [
        [0.3, -0.1, 0.7, 0.2, 0.4, 0.05, 0.9, -0.2, 0.1, 0.33],
        [1, 1, 1, 1, 1, -1, 0, 0, 0, 0, 0, 0],
        [0.5, 0.5, 1.5, 1.5, 2.0, -0.5, 0.5, 1.0],
    ],
)
def test_the_p_value_is_that_of_all_changes_of_signs(differences: list[float]) -> None:
    expected = enumerated_p(differences)
    error = math.sqrt(expected / 10_000)
    found = mean_by_sign_flips(differences)
    assert found.p_value == pytest.approx(expected, abs=4 * error)
    assert found.value == pytest.approx(sum(differences) / len(differences))


def test_binary_scores_have_the_exact_test_of_mcnemar() -> None:
    # 9 wins and 1 loss among 50: 2 · (1 + 10) / 2^10
    differences = [1.0] * 9 + [-1.0] + [0.0] * 40
    assert mean_by_sign_flips(differences).p_value == pytest.approx(22 / 1024, abs=0.006)


def test_the_interval_is_that_of_the_means_of_all_subsets() -> None:
    values = np.random.default_rng(3).normal(1.0, 2.0, 14)
    means = sorted(
        np.mean(values[list(chosen)])
        for size in range(1, 15)
        for chosen in itertools.combinations(range(14), size)
    )
    found = mean_by_sign_flips(values)
    spread = means[-1] - means[0]
    assert found.low == pytest.approx(means[round(0.025 * len(means))], abs=0.02 * spread)
    assert found.high == pytest.approx(means[round(0.975 * len(means))], abs=0.02 * spread)


@pytest.mark.parametrize("seeds", [1, 3])
def test_an_interval_leaves_zero_out_where_the_test_rejects_it(seeds: int) -> None:
    generator = np.random.default_rng(5)
    rejected = []
    for trial in range(60):
        a = (generator.random((seeds, 40)) < 0.5).astype(float)
        b = (generator.random((seeds, 40)) < 0.5 + trial / 150).astype(float)
        found = paired_difference(a, b)
        rejected.append(found.p_value <= 0.05)
        assert rejected[-1] == (not found.low <= 0 <= found.high)
    assert 5 < sum(rejected) < 55


def test_too_few_prompts_have_no_interval() -> None:
    # all signs alike are 2 of 2^4 changes
    found = mean_by_sign_flips([1.0, 2.0, 1.5, 3.0])
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert found.p_value == pytest.approx(2 / 16, abs=0.02)
    alone = paired_difference([[0.0], [1.0]], [[1.0], [1.0]])
    assert (alone.value, alone.low, alone.p_value) == (0.5, -math.inf, 1.0)


def test_sides_without_a_difference_are_equal() -> None:
    a = np.tile([0.0, 1.0], 20)
    assert paired_difference(a, a) == (0.0, 0.0, 0.0, 1.0)
    assert paired_difference([a, a], [a, a]) == (0.0, 0.0, 0.0, 1.0)
    found = wins(a, a)
    assert (found.wins, found.ties, found.losses) == (0, 1, 0)


@pytest.mark.parametrize("gain", [1.0, 0.1])
def test_equal_gains_of_few_prompts_show_nothing_with_several_seeds_too(gain: float) -> None:
    a = np.tile([0.2, 0.4, 0.7], (3, 1))
    found = paired_difference(a, a + gain)  # of 0.1 the differences are equal but for rounding
    # all signs alike: 2 of 2^3
    assert found.p_value == pytest.approx(2 / 8, abs=0.02)
    assert (found.value, found.low, found.high) == (pytest.approx(gain), -math.inf, math.inf)
    many = paired_difference(np.tile(a, 4), np.tile(a + gain, 4))
    # 2 of 2^12
    assert many.p_value < 0.002
    assert (many.low, many.high) == (pytest.approx(gain), pytest.approx(gain))
    net = wins(a, a + gain).net
    assert (net.value, net.p_value) == (1.0, pytest.approx(2 / 8, abs=0.02))


def test_seeds_and_prompts_both_count() -> None:
    # two seeds and two prompts of A, one seed of B, by hand: the differences of the prompts are
    # 0 and 2: 2 / 2 prompts; the seeds' means are 1 and 3: 2 / 2 seeds; the residual is
    # ±1: 4 / 1 / (2 · 2) = 1, which is in both. The larger: 1; degrees: 1 / (1 + 1), at least 1
    a, b = [[0.0, 2.0], [4.0, 2.0]], [2.0, 4.0]
    found = paired_difference(a, b)
    assert found.value == 1.0
    assert found.high - found.value == pytest.approx(12.7062, abs=1e-3)
    spread = variances(a, b)
    assert spread == (0.0, (0.0, 0.0), (4.0, 0.0))
    assert spread.of_mean(2, (2, 1)) == 1.0


def test_with_prompts_alike_several_seeds_are_the_test_of_welch() -> None:
    # every prompt of a seed has the same score: means 1, 2, 4 and 5, 6, 9
    a, b = (np.repeat([[x], [y], [z]], 10, axis=1) for x, y, z in ((1, 2, 4), (5, 6, 9)))
    # scipy 1.17.1: ttest_ind([5, 6, 9], [1, 2, 4], equal_var=False)
    found = paired_difference(a, b)
    assert found.value == pytest.approx(13 / 3)
    assert found.p_value == pytest.approx(0.04864582145, abs=1e-9)
    assert (found.low, found.high) == pytest.approx((0.0433256283, 8.6233410384), abs=1e-8)


def test_every_seed_meets_every_seed() -> None:
    a, b = [[0, 0, 1], [1, 0, 0]], [[1, 0, 0]]
    # of B against the seeds of A: win tie loss, tie tie tie
    found = wins(a, b)
    assert (found.wins, found.ties, found.losses) == pytest.approx((1 / 6, 4 / 6, 1 / 6))
    assert found.net.value == 0
    # of B against A's one run: win win loss, tie tie win
    better = wins([[0, 0, 1]], [[1, 1, 0], [0, 0, 2]])
    assert (better.wins, better.ties, better.losses) == pytest.approx((3 / 6, 2 / 6, 1 / 6))
    assert better.net.value == pytest.approx(2 / 6)


def test_rounding_makes_no_wins() -> None:
    found = wins([0.1 + 0.2, 1.0], [0.3, 1.0])
    assert found.ties == 1


@pytest.mark.parametrize("seeds", [(1, 1), (3, 3), (1, 3)])
def test_the_order_of_prompts_and_seeds_does_not_matter(seeds: tuple[int, int]) -> None:
    generator = np.random.default_rng(0)
    a, b = (generator.random((count, 30)).round(1) for count in seeds)
    order = generator.permutation(30)
    for test in (paired_difference, lambda a, b: wins(a, b).net):
        assert test(a[::-1][:, order], b[:, order]) == pytest.approx(test(a, b), abs=1e-12)


def test_to_exchange_the_sides_changes_the_sign() -> None:
    generator = np.random.default_rng(1)
    a, b = generator.random((1, 200)), generator.random((1, 200)) + 0.1
    there, back = paired_difference(a, b), paired_difference(b, a)
    width = there.high - there.low
    assert back.value == pytest.approx(-there.value)
    assert (-back.high, -back.low) == pytest.approx((there.low, there.high), abs=0.03 * width)


def test_holm_by_hand() -> None:
    # sorted 0.01 · 4, 0.02 · 3, 0.03 · 2 (as the one before: 0.06), 0.5 · 1
    assert holm([0.03, 0.01, 0.5, 0.02]) == pytest.approx([0.06, 0.04, 0.5, 0.06])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="the same prompts"):
        paired_difference(np.zeros((2, 3)), np.zeros((2, 4)))
    with pytest.raises(ValueError, match="no scores"):
        paired_difference([], [])
    with pytest.raises(ValueError, match="not finite"):
        paired_difference([1.0, math.nan], [1.0, 1.0])
    with pytest.raises(ValueError, match="at least one"):
        mean_by_sign_flips([])
    with pytest.raises(ValueError, match="confidence is 95"):
        paired_difference([1.0, 0.0], [1.0, 1.0], confidence=95)
    with pytest.raises(ValueError, match="one prompt"):
        variances([1.0], [1.0])
