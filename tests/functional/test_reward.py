"""Pair losses where numbers get extreme; by hand they are in tests/modules/test_pairs.py."""

import math

import pytest
import torch

from lrlhf.functional import bradley_terry_loss, center_penalty, hps_loss, log_exp_loss

CHOSEN, REJECTED = torch.tensor([2.0, 0.5]), torch.tensor([1.0, 2.5])  # gaps 1 and -2


@pytest.mark.parametrize("shape", [(2, 1), (1,), (3,)])
def test_a_margin_that_would_broadcast_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"margin has shape \[.*2 pairs"):
        bradley_terry_loss(CHOSEN, REJECTED, margin=torch.zeros(shape))


@pytest.mark.parametrize("smoothing", [-0.1, 0.5, 1.0, float("nan")])
def test_an_impossible_smoothing_is_refused(smoothing: float) -> None:
    with pytest.raises(ValueError, match="label_smoothing"):
        bradley_terry_loss(CHOSEN, REJECTED, label_smoothing=smoothing)


def test_a_label_that_may_be_wrong_counts_for_both_answers() -> None:
    found = bradley_terry_loss(CHOSEN, REJECTED, margin=0.5, label_smoothing=0.1)
    # leads of 1 - 0.5 and -2 - 0.5
    expected = [
        0.9 * math.log1p(math.exp(-lead)) + 0.1 * math.log1p(math.exp(lead)) for lead in (0.5, -2.5)
    ]
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("loss", [bradley_terry_loss, log_exp_loss, hps_loss])
@pytest.mark.parametrize(("gap", "value", "slope"), [(-1e4, 1e4, -1), (1e4, 0, 0)])
def test_huge_gaps_stay_finite(loss, gap: float, value: float, slope: float) -> None:
    chosen = torch.tensor([gap], requires_grad=True)
    result = loss(chosen, torch.zeros(1))
    result.sum().backward()
    assert result.item() == value
    assert chosen.grad is not None
    assert chosen.grad.item() == slope


@pytest.mark.parametrize("loss", [bradley_terry_loss, log_exp_loss, hps_loss, center_penalty])
def test_gradients_are_right(loss) -> None:
    pair = [x.double().requires_grad_() for x in (CHOSEN, REJECTED)]
    assert torch.autograd.gradcheck(loss, pair)
