import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from lrlhf.rewards import RewardError, RewardResult, Rewards


def score(returned: Any) -> RewardResult:
    def odd(**_: Any) -> Any:
        return returned

    rewards = Rewards([odd], max_unscorable_fraction=1.0)
    return rewards.score(["p"] * 3, ["c"] * 3, [[1]] * 3, [{}] * 3)


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0, 2],
        [1.0, False, 2],
        torch.tensor([1.0, 0.0, 2.0]),
        torch.tensor([1, 0, 2], dtype=torch.bfloat16, requires_grad=False),
        np.array([1.0, 0.0, 2.0]),
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
        math.inf,
        math.nan,
        "0.5",
        [1.0],
        object(),
        1e39,  # infinite in float32
        10**400,  # infinite in float64
        torch.tensor([1.0]),
        np.float64("nan"),
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
        (np.ones((1, 3)), r"'odd' returned ndarray of shape \(1, 3\)"),
        (None, "'odd' returned NoneType None"),
        ("abc", "'odd' returned str 'abc'"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, "'odd' returned dict"),
        ((value for value in (1.0, 2.0, 3.0)), "'odd' returned generator"),
    ],
)
def test_without_one_value_per_response_scoring_stops(returned: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        score(returned)
