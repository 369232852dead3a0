"""Plans at their edges: few prompts, and nothing that varies."""

import math

import pytest

from lrlhf.statistics import (
    Variances,
    detectable_difference,
    paired_difference,
    power,
    prompts_needed,
    seeds_needed,
)
from lrlhf.statistics.intervals import unseen_share
from lrlhf.statistics.paired import fewest_prompts

NOTHING = Variances(0.0, (0.0, 0.0), (0.0, 0.0))


def test_one_seed_each_finds_nothing_below_six_prompts() -> None:
    # 2 / 2^5 > 0.05 ≥ 2 / 2^6, and 2 / 2^7 > 0.01 ≥ 2 / 2^8
    assert (fewest_prompts(), fewest_prompts(0.99)) == (6, 8)
    for count in range(2, 9):
        shown = paired_difference([0.0] * count, [5.0] * count).p_value <= 0.05
        assert shown == (count >= fewest_prompts())
    spread = NOTHING._replace(prompts=1e-6)
    assert prompts_needed(spread, 1.0) == 6
    assert power(spread, 1.0, prompts=5) == 0
    assert power(spread, 1.0, prompts=6) == pytest.approx(1.0)
    assert detectable_difference(spread, prompts=5) == math.inf
    assert 0 < detectable_difference(spread, prompts=6) < 0.01


def test_several_seeds_may_find_something_with_fewer() -> None:
    spread = Variances(1e-6, (1e-6, 1e-6), (1e-6, 1e-6))
    assert prompts_needed(spread, 1.0, seeds=(3, 3)) == 2
    assert power(spread, 1.0, prompts=3, seeds=(3, 3)) == pytest.approx(1.0)


def test_where_nothing_varies_only_the_number_of_prompts_counts() -> None:
    for seeds in ((1, 1), (3, 3)):
        assert prompts_needed(NOTHING, 0.01, seeds=seeds) == 6
        assert power(NOTHING, 0.01, prompts=5, seeds=seeds) == 0
        assert power(NOTHING, 0.01, prompts=6, seeds=seeds) == 1
        assert power(NOTHING, 0.0, prompts=60, seeds=seeds) == 0
    assert seeds_needed(NOTHING, 0.01, prompts=5) is None


@pytest.mark.parametrize("count", [1, 2, 10, 1000])
def test_a_share_may_be_as_large_as_a_sample_misses_in_one_of_twenty(count: int) -> None:
    share = unseen_share(count)
    assert (1 - share) ** count == pytest.approx(0.05)
    assert unseen_share(1000) == pytest.approx(3 / 1000, rel=0.01)
