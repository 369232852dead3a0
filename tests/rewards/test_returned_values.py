import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from lrlhf.rewards import RewardError, RewardResult, Rewards, StepValues
from lrlhf.rewards.function import StepReward
from lrlhf.rewards.reward_values import Returned, weighted_steps


def score(returned: Any) -> RewardResult:
    def odd(**_: Any) -> Any:
        return returned

    rewards = Rewards([odd], max_unscorable_fraction=1.0)
    return rewards.score(["p"] * 3, ["c"] * 3, [[1]] * 3, [{}] * 3)


@pytest.mark.parametrize(
    "returned",
    [
        [1.0, False, 2],
        torch.tensor([1, 0, 2], dtype=torch.bfloat16, requires_grad=False),
        [torch.tensor(1.0), np.float32(0.0), np.int64(2)],
        [Fraction(1), np.bool_(False), np.array(2.0)],
    ],
)
def test_numbers_of_every_kind_are_read(returned: Any) -> None:
    result = score(returned)
    assert result.scores.tolist() == [1.0, 0.0, 2.0]
    assert result.failures == []


@pytest.mark.parametrize(
    "bad",
    [
        math.nan,
        "0.5",
        object(),
        1e39,  # infinite in float32
        10**400,  # infinite in float64
        torch.tensor([1.0]),
    ],
)
def test_what_is_no_finite_number_leaves_its_response_without_value(bad: Any) -> None:
    result = score([1.0, bad, 2.0])
    assert result.scores[[0, 2]].tolist() == [1.0, 2.0]
    assert result.scores[1].isnan()
    (failure,) = result.failures
    assert failure.startswith("odd: returned 1 of 3 values")
    assert "position 1" in failure
    assert f"({type(bad).__name__})" in failure


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0, 2.0], "'odd' returned 2 values for 3 responses .position 2"),
        ([1.0] * 4, "'odd' returned 4 values for 3 responses .position 3"),
        (torch.ones(3, 1), r"'odd' returned Tensor of shape \(3, 1\)"),
        (None, "'odd' returned NoneType None"),
        ("abc", "'odd' returned str 'abc'"),
        ((value for value in (1.0, 2.0, 3.0)), "'odd' returned generator"),
    ],
)
def test_without_one_value_per_response_scoring_stops(returned: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        score(returned)


def test_steps_are_paid_where_their_response_has_a_value() -> None:
    steps = [[StepReward(3, 1.0)], [StepReward(5, 2.0), StepReward(9, -1.0)]]
    returned = Returned(1, "odd", [0, 2], StepValues([None, 1.0], steps))
    weights = torch.tensor([[1.0, 0.5]] * 3)
    # of the third response alone, half of 2 and of -1
    assert weighted_steps([returned], weights) == (
        (),
        (),
        (StepReward(5, 1.0), StepReward(9, -0.5)),
    )
