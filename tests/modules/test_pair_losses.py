"""Losses by hand: softplus(-gap) of a preference, weight times abs(gap) of a tie."""

import math

import pytest
import torch
from torch import Tensor

from lrlhf.functional.reward import bradley_terry_loss
from lrlhf.modules.pairs.pair_losses import PairObjective, resolve_losses

NAN = float("nan")


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def objective(loss: str | dict[str, float] = "bradley_terry", **options: float) -> PairObjective:
    return PairObjective(losses=resolve_losses(loss), **options)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def squared_gap(chosen: Tensor, rejected: Tensor) -> Tensor:
    return (chosen - rejected - 1).square()


def test_labels_say_which_candidate_should_lead() -> None:
    loss = objective(tie_weight=0.5)(column(2, 2, 2, 2), column(1, 1, -1, 7), column(1, -1, 0, NAN))
    # gap 1; gap -1; tie with |gap| 3; no label
    assert loss.flatten().tolist() == pytest.approx([softplus(-1), softplus(1), 1.5, 0.0])


def test_a_missing_label_sends_no_gradient_even_from_an_infinite_score() -> None:
    scores0 = torch.tensor([[1.0, float("inf")]], requires_grad=True)
    scores1 = torch.tensor([[0.0, 0.0]], requires_grad=True)
    objective()(scores0, scores1, torch.tensor([[1.0, NAN]])).sum().backward()
    assert scores0.grad is not None
    assert scores0.grad[0, 1] == 0
    assert scores0.grad[0, 0] == pytest.approx(-1 / (1 + math.e))


@pytest.mark.parametrize("loss", ["bradley_terry", "log_exp", "hps"])
def test_every_loss_honours_the_margin(loss: str) -> None:
    value = objective(loss, margin=0.5)(column(2), column(1), column(1))
    assert value.item() == pytest.approx(softplus(-0.5))


def test_a_margin_of_the_pair_replaces_the_constant_one() -> None:
    margin = torch.tensor([3.0, NAN], dtype=torch.float64)
    value = objective(margin=0.5)(column(2, 2), column(1, 1), column(1, 1), margin)
    assert value.flatten().tolist() == pytest.approx([softplus(2), softplus(-0.5)])


def test_a_margin_of_the_pair_counts_for_each_of_its_heads() -> None:
    margin = torch.tensor([3.0, 0.0])
    scores = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    value = objective()(scores, torch.zeros(2, 2), torch.ones(2, 2), margin)
    expected = [softplus(2), softplus(1), softplus(-1), softplus(-2)]
    assert value.flatten().tolist() == pytest.approx(expected)


def test_centering_counts_for_preferences_and_ties() -> None:
    value = objective(center_coef=0.1, tie_weight=0.0)(column(2, 2), column(1, 1), column(1, 0))
    assert value.flatten().tolist() == pytest.approx([softplus(-1) + 0.9, 0.9])


def test_label_smoothing_mixes_in_the_opposite_label() -> None:
    value = objective(label_smoothing=0.2, margin=0.5)(column(2), column(1), column(1))
    assert value.item() == pytest.approx(0.8 * softplus(-0.5) + 0.2 * softplus(0.5))


def test_a_smoothed_preference_with_a_margin_is_the_smoothed_function() -> None:
    chosen, rejected, margin = torch.randn(3, 5)
    value = objective(label_smoothing=0.2)(
        chosen[:, None], rejected[:, None], torch.ones(5, 1), margin
    )
    expected = bradley_terry_loss(chosen, rejected, margin=margin, label_smoothing=0.2)
    torch.testing.assert_close(value[:, 0], expected)


def test_a_mix_is_the_weighted_sum_and_takes_functions_by_path() -> None:
    mix = {"bradley_terry": 2.0, f"{__name__}.squared_gap": 0.5}
    value = objective(mix)(column(4), column(1), column(1))
    assert value.item() == pytest.approx(2 * softplus(-3) + 0.5 * 4)


def test_swapping_candidates_and_labels_changes_nothing() -> None:
    a, b = torch.randn(6, 2), torch.randn(6, 2)
    labels = torch.tensor([[1.0, -1], [0, NAN], [-1, 1], [1, 0], [NAN, 1], [-1, -1]])
    margin = torch.rand(6)
    loss = objective(tie_weight=0.3, center_coef=0.1, label_smoothing=0.1)
    torch.testing.assert_close(loss(a, b, labels, margin), loss(b, a, -labels, margin))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tie_weight": -1.0}, "tie_weight is -1.0"),
        ({"center_coef": -1.0}, "center_coef is -1.0"),
        ({"label_smoothing": 0.5}, "label_smoothing is 0.5"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        objective(**options)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("bradly_terry", "did you mean bradley_terry"),
        ("nowhere.loss", "'nowhere.loss' cannot be imported"),
        ("math.pi", "cannot be called: it is a float"),
        ({}, "loss is empty"),
    ],
)
def test_losses_that_do_not_exist_are_refused(loss: str | dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_losses(loss)
