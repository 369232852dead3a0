"""Masked reductions against arithmetic by hand."""

import math

import pytest
import torch

from lrlhf.functional import masked_mean, masked_sum, standardize, whiten

NAN = float("nan")
X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64)
MASK = torch.tensor([[True, False, True], [False, False, True]])
NOTHING = torch.zeros_like(MASK)


def test_sums_count_what_the_mask_counts() -> None:
    assert masked_sum(X, MASK).item() == 10  # 1 + 3 + 6
    assert masked_sum(X, MASK, dim=1).tolist() == [4, 6]
    assert masked_sum(X, MASK, dim=0).tolist() == [1, 0, 9]


def test_means_divide_by_what_the_mask_counts() -> None:
    assert masked_mean(X, MASK).item() == pytest.approx(10 / 3)
    assert masked_mean(X, MASK, dim=1).tolist() == [2, 6]
    assert masked_mean(X, MASK, dim=0).tolist() == [1, 0, 4.5]


@pytest.mark.parametrize("reduce", [masked_sum, masked_mean])
def test_an_empty_mask_gives_zero(reduce) -> None:  # type: ignore[no-untyped-def]
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


def test_whitening_gives_mean_zero_and_unit_variance() -> None:
    # 1, 3, 6: mean 10/3, squares (49 + 1 + 64)/9, so the variance is 114/9/2 = 19/3
    expected = [(x - 10 / 3) / math.sqrt(19 / 3) for x in (1, 3, 6)]
    assert whiten(X, MASK)[MASK].tolist() == pytest.approx(expected)
    assert (whiten(torch.where(MASK, X, NAN), MASK)[~MASK] == 0).all()


def test_whitening_adds_eps_to_the_variance() -> None:
    # variance 19/3 + 29/3 = 16, so the deviation is 4
    whitened = whiten(X, MASK, eps=29 / 3)
    assert whitened[0, 0].item() == pytest.approx((1 - 10 / 3) / 4)


def test_a_z_score_adds_eps_to_the_deviation() -> None:
    expected = [(x - 10 / 3) / (math.sqrt(19 / 3) + 0.5) for x in (1, 3, 6)]
    scores = standardize(torch.where(MASK, X, NAN), MASK, eps=0.5)
    assert scores[MASK].tolist() == pytest.approx(expected)
    assert (scores[~MASK] == 0).all()


@pytest.mark.parametrize("normalize", [whiten, standardize])
@pytest.mark.parametrize("value", [0.1, -0.7, 1e4])
def test_equal_entries_are_exactly_zero(normalize, value: float) -> None:  # type: ignore[no-untyped-def]
    # three times 0.1 in float32, averaged, is not 0.1
    x = torch.full((7,), value)
    assert normalize(x, torch.ones(7, dtype=torch.bool)).tolist() == [0] * 7


@pytest.mark.parametrize("normalize", [whiten, standardize])
def test_none_or_one_entry_has_nothing_to_compare_with(normalize) -> None:  # type: ignore[no-untyped-def]
    assert (normalize(X, NOTHING) == 0).all()
    one = NOTHING.clone()
    one[0, 1] = True
    assert (normalize(X, one) == 0).all()
