"""Masked reductions against arithmetic by hand."""

import math

import pytest
import torch

from lrlhf.functional import masked_mean, masked_sum, standardize, whiten

NAN = float("nan")
X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64)
MASK = torch.tensor([[True, False, True], [False, False, True]])
NOTHING = torch.zeros_like(MASK)


def test_sums_and_means_count_what_the_mask_counts() -> None:
    assert masked_sum(X, MASK).item() == 10  # 1 + 3 + 6
    assert masked_sum(X, MASK, dim=1).tolist() == [4, 6]
    assert masked_sum(X, MASK, dim=0).tolist() == [1, 0, 9]
    assert masked_mean(X, MASK).item() == pytest.approx(10 / 3)
    assert masked_mean(X, MASK, dim=1).tolist() == [2, 6]
    assert masked_mean(X, MASK, dim=0).tolist() == [1, 0, 4.5]
    for reduce in (masked_sum, masked_mean):
        assert reduce(X, NOTHING).item() == 0
        assert reduce(X, NOTHING, dim=1).tolist() == [0, 0]
        assert reduce(X[:0], NOTHING[:0]).item() == 0


@pytest.mark.parametrize("outside", [NAN, math.inf])
def test_what_the_mask_hides_reaches_neither_value_nor_gradient(outside: float) -> None:
    x = torch.where(MASK, X, outside).requires_grad_()
    total = masked_mean(x, MASK)
    total.backward()
    assert total.item() == pytest.approx(10 / 3)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, MASK / torch.tensor(3.0, dtype=torch.float64))


def test_normalized_entries_have_mean_zero_and_unit_deviation() -> None:
    # 1, 3, 6: mean 10/3, squares (49 + 1 + 64)/9, so the variance is 114/9/2 = 19/3
    hidden = torch.where(MASK, X, NAN)
    for found, deviation in (
        (whiten(hidden, MASK), math.sqrt(19 / 3)),
        (whiten(hidden, MASK, eps=29 / 3), 4.0),  # added to the variance
        (standardize(hidden, MASK, eps=0.5), math.sqrt(19 / 3) + 0.5),  # to the deviation
    ):
        expected = [(x - 10 / 3) / deviation for x in (1, 3, 6)]
        assert found[MASK].tolist() == pytest.approx(expected)
        assert (found[~MASK] == 0).all()


def test_whitening_may_keep_the_mean() -> None:
    found = whiten(torch.where(MASK, X, NAN), MASK, shift_mean=False, eps=29 / 3)  # deviation 4
    assert found[MASK].tolist() == pytest.approx([(x - 10 / 3) / 4 + 10 / 3 for x in (1, 3, 6)])
    assert (found[~MASK] == 0).all()


@pytest.mark.parametrize("normalize", [whiten, standardize])
@pytest.mark.parametrize("value", [0.1, -0.7, 1e4])
def test_equal_entries_are_exactly_zero(normalize, value: float) -> None:
    # three times 0.1 in float32, averaged, is not 0.1
    x = torch.tensor([NAN, *[value] * 7])
    assert normalize(x, ~x.isnan()).tolist() == [0] * 8


@pytest.mark.parametrize("normalize", [whiten, standardize])
def test_none_or_one_entry_has_nothing_to_compare_with(normalize) -> None:
    assert (normalize(X, NOTHING) == 0).all()
    one = NOTHING.clone()
    one[0, 1] = True
    assert (normalize(X, one) == 0).all()
