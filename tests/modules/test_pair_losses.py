"""Losses by hand: softplus(-gap) of a preference, weight times abs(gap) of a tie."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

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


def test_a_missing_label_costs_nothing_whatever_the_score() -> None:
    scores0 = torch.tensor([[1.0, float("-inf")]], requires_grad=True)
    scores1 = torch.tensor([[0.0, 0.0]], requires_grad=True)
    loss = objective()(scores0, scores1, torch.tensor([[1.0, NAN]]))
    assert loss[0, 1] == 0  # what the pair would have cost is infinite
    loss.sum().backward()
    assert scores0.grad is not None
    assert scores0.grad[0, 1] == 0
    assert scores0.grad[0, 0] == pytest.approx(-1 / (1 + math.e))


@pytest.mark.parametrize(
    ("loss", "options", "expected"),
    [
        ("bradley_terry", {"margin": 0.5}, softplus(-0.5)),
        ("log_exp", {"margin": 0.5}, softplus(-0.5)),
        ("hps", {"margin": 0.5}, softplus(-0.5)),
        ("hps", {"center_coef": 0.1}, softplus(-1) + 0.9),
        (
            "hps",
            {"label_smoothing": 0.2, "margin": 0.5},
            0.8 * softplus(-0.5) + 0.2 * softplus(0.5),
        ),
        ({"hps": 2.0, f"{__name__}.squared_gap": 0.5}, {"margin": -2.0}, 2 * softplus(-3) + 2),
    ],
)
def test_options_of_a_preference(loss: Any, options: dict[str, float], expected: float) -> None:
    value = objective(loss, **options)(column(2), column(1), column(1))
    assert value.item() == pytest.approx(expected)


def test_a_margin_of_the_pair_replaces_the_constant_one_for_each_of_its_heads() -> None:
    margin = torch.tensor([3.0, NAN])
    scores = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    value = objective(margin=0.5)(scores, torch.zeros(2, 2), torch.ones(2, 2), margin)
    expected = [softplus(2), softplus(1), softplus(-0.5), softplus(-1.5)]
    assert value.flatten().tolist() == pytest.approx(expected)


def test_swapping_candidates_and_labels_changes_nothing() -> None:
    a, b = torch.randn(6, 2), torch.randn(6, 2)
    labels = torch.tensor([[1.0, -1], [0, NAN], [-1, 1], [1, 0], [NAN, 1], [-1, -1]])
    margin = torch.rand(6)
    loss = objective(tie_weight=0.3, center_coef=0.1, label_smoothing=0.1)
    torch.testing.assert_close(loss(a, b, labels, margin), loss(b, a, -labels, margin))


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        ("hps", {"tie_weight": -1.0}, "tie_weight is -1.0"),
        ("hps", {"center_coef": -1.0}, "center_coef is -1.0"),
        ("hps", {"label_smoothing": 0.5}, "label_smoothing is 0.5"),
        ("bradly_terry", {}, "did you mean .bradley_terry"),
        ("nowhere.loss", {}, "'nowhere.loss' cannot be imported"),
        ("math.pi", {}, "is a float, not a function"),
        ({}, {}, "loss is empty"),
    ],
)
def test_what_cannot_be_is_refused(loss: Any, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        objective(loss, **options)
