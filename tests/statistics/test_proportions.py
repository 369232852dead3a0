"""Intervals of shares: known values, what must not matter, and how often they hold the truth."""

import numpy as np
import pytest

from lrlhf.statistics.intervals import share_interval, wilson_interval


def test_independent_outcomes_have_wilsons_interval() -> None:
    outcomes = [True] * 12 + [False] * 108

    # Wilson 1927: (0.1 + z² / 240 ± z √(0.09 / 120 + z² / 57600)) / (1 + z² / 120), z = 1.95996
    assert share_interval(outcomes, range(120)) == pytest.approx((0.0581, 0.1666), abs=1e-4)
    assert share_interval([], []) == (0.0, 1.0)


@pytest.mark.parametrize("right", [0, 1, 17, 40])
def test_outcomes_that_are_said_again_say_no_more(right: int) -> None:
    once = [index < right for index in range(40)]

    again = share_interval([one for one in once for _ in range(5)], [k // 5 for k in range(200)])

    # 40, less for the spread that is estimated from them: t(39) = 2.02269 in place of z = 1.95996
    said = 40.0 if right in (0, 40) else 40 * (1.95996 / 2.02269) ** 2
    assert again == pytest.approx(wilson_interval(said * right / 40, said), abs=1e-5)


def test_two_outcomes_of_each_cluster_by_hand() -> None:
    # shares of the clusters 1, 1/2, 1/2, 0: gaps 1, 0, 0, -1; SE² = 4 / 3 · 2 / 64 = 1 / 24
    outcomes = [True, True, True, False, False, True, False, False]

    found = share_interval(outcomes, [0, 0, 1, 1, 2, 2, 3, 3])

    # 1 + 24 / 4, less for an estimated spread: z = 1.95996 of t(3) = 3.18245
    effective = 7 * (1.95996 / 3.18245) ** 2
    assert found == pytest.approx(wilson_interval(effective / 2, effective), abs=1e-5)


def test_neither_order_nor_clusters_that_cancel_make_it_narrower_than_independence() -> None:
    rng = np.random.default_rng(0)
    outcomes, clusters = [True, False] * 30, [k // 2 for k in range(60)]
    order = rng.permutation(60)

    # every cluster has one of two: there is no spread between clusters
    found = share_interval(outcomes, clusters)

    assert found == wilson_interval(30, 60)
    assert share_interval([outcomes[k] for k in order], [clusters[k] for k in order]) == found
    assert share_interval([True, False], ["a", "a"]) == wilson_interval(0.5, 1)


@pytest.mark.parametrize("prompts", [12, 100])
def test_pairs_of_ranked_lists_are_as_many_observations_as_they_say(prompts: int) -> None:
    # four answers of each prompt, ranked: six pairs, some prompts scored better than others
    rng = np.random.default_rng(3)

    def drawn(count: int) -> np.ndarray:
        quality = rng.normal(size=(count, 4))
        skill = rng.choice([0.2, 1.5], size=(count, 1))
        scores = quality * skill + rng.normal(size=(count, 4))
        first, second = np.triu_indices(4, 1)
        return (quality[:, first] > quality[:, second]) == (scores[:, first] > scores[:, second])

    true = drawn(200_000).mean()
    clusters = np.repeat(np.arange(prompts), 6).tolist()
    found = [share_interval(drawn(prompts).ravel().tolist(), clusters) for _ in range(2000)]

    assert np.mean([low <= true <= high for low, high in found]) >= 0.94
    assert all(low >= 0 and high <= 1 and low < high for low, high in found)


def test_a_cluster_that_is_larger_than_the_others_says_no_more_by_hand() -> None:
    # p = 3/6; gaps 1, -1/2, -1/2 of 4, 1 and 1; SE² = 2/3 ((1/2)² + 2 (1/10)²) = 0.18
    outcomes = [True, True, True, False, False, False]

    found = share_interval(outcomes, [0, 0, 0, 0, 1, 2])

    # 1 + 0.25 / 0.18, less for an estimated spread: 36 / 18 - 1 degrees of freedom, t(1) = 12.7062
    effective = (1 + 0.25 / 0.18) * (1.95996 / 12.7062) ** 2
    assert found == pytest.approx(wilson_interval(effective / 2, effective), abs=1e-5)


@pytest.mark.parametrize("sizes", [[40] + [1] * 39, [1, 1, 1, 2, 2, 3, 5, 8, 13, 21]])
def test_clusters_of_unequal_size_hold_the_true_share(sizes: list[int]) -> None:
    rng = np.random.default_rng(4)
    clusters = np.repeat(np.arange(len(sizes)), sizes)
    held = 0
    for _ in range(1000):
        shares = rng.beta(1, 1, size=len(sizes))
        outcomes = (rng.random(len(clusters)) < shares[clusters]).tolist()
        low, high = share_interval(outcomes, clusters.tolist())
        held += low <= 0.5 <= high
    assert held >= 940


def test_outcomes_and_clusters_come_together() -> None:
    with pytest.raises(ValueError, match="shorter"):
        share_interval([True, False], [0])


def test_it_holds_the_true_share_in_95_of_100_samples() -> None:
    rng = np.random.default_rng(1)
    held = alone = 0
    samples, groups, each = 1500, 40, 6
    clusters = np.repeat(np.arange(groups), each).tolist()
    for _ in range(samples):
        shares = rng.beta(1.2, 2.8, size=groups)  # of mean 0.3
        outcomes = (rng.random((groups, each)) < shares[:, None]).ravel()
        low, high = share_interval(outcomes.tolist(), clusters)
        held += low <= 0.3 <= high
        low, high = wilson_interval(int(outcomes.sum()), len(outcomes))
        alone += low <= 0.3 <= high
    assert 0.93 < held / samples < 0.97
    assert alone / samples < 0.87
