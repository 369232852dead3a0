"""Every mode against ratios worked out by hand, and what must not matter."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lrlhf.functional import IMPORTANCE_MODES, importance_weights

MASK = torch.tensor([[False, True, True, True], [False, True, False, False], [False] * 4])
# ratios 3, 0.4, 1 with the product 1.2 and the geometric mean 1.2^(1/3) = 1.0627; then a single 8;
# then no response at all. What stands outside the mask must not be read.
RATIOS = [[7.0, 3.0, 0.4, 1.0], [7.0, 8.0, 0.0, 7.0], [7.0, 7.0, 7.0, 7.0]]


def weights(ratios: list[list[float]], mask: Tensor, **options: Any) -> list[list[float]]:
    sampling = -torch.rand(len(ratios), len(ratios[0]), dtype=torch.float64)
    logprobs = sampling + torch.tensor(ratios, dtype=torch.float64).log()
    return importance_weights(logprobs, sampling, mask, **options).tolist()


@pytest.mark.parametrize(
    ("mode", "low", "high", "first", "second"),
    [
        ("token_truncate", 0.0, 2.0, [2.0, 0.4, 1.0], 2.0),
        ("token_truncate", 0.0, 5.0, [3.0, 0.4, 1.0], 5.0),
        ("token_truncate", 0.0, math.inf, [3.0, 0.4, 1.0], 8.0),
        ("token_mask", 0.5, 5.0, [3.0, 0.0, 1.0], 0.0),
        ("token_mask", 0.3, 9.0, [3.0, 0.4, 1.0], 8.0),
        ("token_mask", 0.3, 2.0, [0.0, 0.4, 1.0], 0.0),
        ("sequence_truncate", 0.0, 2.0, [1.2, 1.2, 1.2], 2.0),
        ("sequence_truncate", 0.0, 1.1, [1.1, 1.1, 1.1], 1.1),
        ("sequence_mask", 0.0, 3.0, [1.2, 1.2, 1.2], 0.0),
        ("sequence_mask", 0.0, 1.1, [0.0, 0.0, 0.0], 0.0),
        ("sequence_mask", 0.0, 9.0, [1.2, 1.2, 1.2], 8.0),
        # between 1.06 and 1.07 lies the geometric mean, not the product
        ("sequence_mean_mask", 0.9, 1.07, [1.0, 1.0, 1.0], 0.0),
        ("sequence_mean_mask", 0.9, 1.06, [0.0, 0.0, 0.0], 0.0),
        ("sequence_mean_mask", 0.9, 9.0, [1.0, 1.0, 1.0], 1.0),
    ],
)
def test_each_mode_makes_of_the_ratios_what_it_should(
    mode: str, low: float, high: float, first: list[float], second: float
) -> None:
    expected = [[1.0, *first], [1.0, second, 1.0, 1.0], [1.0] * 4]
    found = weights(RATIOS, MASK, mode=mode, low=low, high=high)
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted)


@pytest.mark.parametrize("mode", ["sequence_mask", "sequence_mean_mask", "token_mask"])
def test_a_ratio_below_the_lower_bound_counts_nothing(mode: str) -> None:
    mask = torch.tensor([[True, True]])
    # 0.6 · 0.6 = 0.36, geometric mean 0.6: all below 0.7
    assert weights([[0.6, 0.6]], mask, mode=mode, low=0.7, high=2.0) == [[0.0, 0.0]]


@pytest.mark.parametrize("mode", sorted(IMPORTANCE_MODES))
def test_equal_probabilities_weigh_1_whatever_the_bounds(mode: str) -> None:
    chosen = IMPORTANCE_MODES[mode]
    tightest = 0.0 if chosen.truncates else 1.0
    for low, high in ((chosen.low, chosen.high), (tightest, 1.0)):
        assert weights([[1.0] * 4] * 3, MASK, mode=mode, low=low, high=high) == [[1.0] * 4] * 3


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_a_ratio_without_bound_stays_finite(mode: str) -> None:
    # log-ratios are bounded to 20, also that of a whole response
    given = torch.zeros(1, 3), torch.full((1, 3), -500.0), torch.ones(1, 3, dtype=torch.bool)
    found = importance_weights(*given, mode=mode, low=0.0, high=math.inf)
    torch.testing.assert_close(found, torch.full((1, 3), math.exp(20)))


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"mode": "token_trunkate", "low": 0.0, "high": 2.0}, "did you mean 'token_truncate'"),
        ({"mode": "token_mask", "low": -0.1, "high": 2.0}, "low is -0.1"),
        ({"mode": "token_mask", "low": 1.1, "high": 2.0}, "low is 1.1"),
        ({"mode": "token_mask", "low": 0.5, "high": 0.9}, "high is 0.9"),
        ({"mode": "token_mask", "low": 0.5, "high": math.nan}, "high is nan"),
        ({"mode": "token_truncate", "low": 0.5, "high": 2.0}, "no lower bound"),
        ({"mode": "sequence_truncate", "low": 0.5, "high": 2.0}, "no lower bound"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        weights(RATIOS, MASK, **options)
