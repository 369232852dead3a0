"""The value loss by hand."""

import pytest
import torch

from lrlhf.functional import clipped_value_loss

MASK = torch.tensor([[True, True, True, False]])
OLD = torch.tensor([[1.0, 1.0, 1.0, float("nan")]])
RETURNS = torch.tensor([[2.0, 0.0, 1.0, float("nan")]])


def values() -> torch.Tensor:
    return torch.tensor([[1.5, 1.5, 1.0, float("inf")]], requires_grad=True)


def test_without_clipping_it_is_half_the_squared_error() -> None:
    loss = clipped_value_loss(values(), OLD, RETURNS, MASK)
    assert loss.tolist() == [[0.125, 1.125, 0, 0]]


def test_a_move_beyond_the_range_does_not_pay() -> None:
    v, old, returns = values(), OLD.clone().requires_grad_(), RETURNS.clone().requires_grad_()
    loss = clipped_value_loss(v, old, returns, MASK, value_clip_range=0.2)
    # clipped to 1.2: towards the return ½·0.8², away from it the larger ½·1.5² stays
    assert loss.tolist()[0] == pytest.approx([0.32, 1.125, 0, 0])
    loss.sum().backward()
    assert v.grad is not None
    assert v.grad.tolist() == [[0, 1.5, 0, 0]]
    assert old.grad is None
    assert returns.grad is None


@pytest.mark.parametrize("clip", [0.0, -0.1])
def test_an_impossible_range_is_refused(clip: float) -> None:
    with pytest.raises(ValueError, match="value_clip_range"):
        clipped_value_loss(values(), OLD, RETURNS, MASK, value_clip_range=clip)
