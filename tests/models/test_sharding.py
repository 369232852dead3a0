"""Running parts of a model within its outermost hooks, and loading weights into it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from lrlhf.models import zero
from lrlhf.models.sharding import (
    CheckpointMismatchError,
    device_of,
    full_shape,
    full_tensor,
    full_weights,
    gathered,
    has_split_weights,
    load_state,
    part_of,
    within,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.head = nn.Linear(3, 1)
        self.tied = self.head
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(x))
        return output


@pytest.fixture
def model() -> Model:
    return Model()


X = torch.tensor([[1.0, -2.0]])


def test_the_function_may_call_the_model_and_run_within_it_again(model: Model) -> None:
    expected = model(X)
    assert torch.equal(within(model, lambda: model(X)), expected)
    assert torch.equal(within(model, lambda: within(model, lambda: model(X))), expected)
    nested = within(model, lambda: within(model.body, lambda: model.head(model.body(X))))
    assert torch.equal(nested, expected)
    assert "forward" not in vars(model)
    assert "forward" not in vars(model.body)


def fail() -> None:
    raise ValueError("in the function")


def refuse(*_: Any) -> None:
    raise ValueError("in a hook")


@pytest.mark.parametrize("where", ["function", "hook"])
def test_an_exception_leaves_the_models_own_forward(model: Model, where: str) -> None:
    plain = model.forward
    model.forward = lambda x: plain(x) * 2  # type: ignore[method-assign]  # as accelerate does
    expected, before = model(X), vars(model)["forward"]
    handle = model.register_forward_pre_hook(refuse if where == "hook" else lambda *_: None)
    with pytest.raises(ValueError, match="in "):
        within(model, lambda: within(model, fail))
    handle.remove()
    assert vars(model)["forward"] is before
    assert torch.equal(model(X), expected)


# ---------------------------------------------------------------------- not split


def test_of_a_model_that_is_not_split_everything_is_the_identity(model: Model) -> None:
    weight = model.body.weight
    assert not has_split_weights(model)
    assert full_tensor(weight) is weight
    assert full_shape(weight) == (3, 2)
    full = torch.ones(3, 2)
    assert part_of(weight, full) is full
    with gathered(model), full_weights(model):
        assert model.body.weight is weight
    assert model.body.weight is weight
    with pytest.raises(RuntimeError, match="inside"), full_weights(model):
        raise RuntimeError("inside")
    assert model.body.weight is weight


def test_stored_weights_are_copied_in_the_precision_of_the_model(model: Model) -> None:
    stored = {name: value.to(torch.bfloat16) for name, value in Model().state_dict().items()}
    stored["count"] = torch.tensor(7)
    weight = model.body.weight
    load_state(model, stored)
    assert model.body.weight is weight
    assert weight.requires_grad
    assert weight.dtype == torch.float32
    assert model.tied.weight is model.head.weight
    for name, value in stored.items():
        assert torch.equal(model.state_dict()[name], value.float())
    stored["body.weight"].zero_()
    assert weight.any()


def test_names_that_only_one_side_has_are_refused_before_anything_is_written(model: Model) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stored = {name: torch.zeros_like(value) for name, value in before.items()}
    fewer = {name: value for name, value in stored.items() if name != "head.bias"}
    with pytest.raises(CheckpointMismatchError, match=r"only the model has 'head\.bias' \(1 names"):
        load_state(model, fewer)
    with pytest.raises(CheckpointMismatchError, match=r"only the checkpoint has 'a' \(1 names"):
        load_state(model, {**stored, "a": torch.ones(1)})
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value)


@pytest.mark.parametrize("shape", [(2, 3), (1, 2)])
def test_other_shapes_are_refused_even_if_they_would_broadcast(
    model: Model, shape: tuple[int, ...]
) -> None:
    stored = {**model.state_dict(), "body.weight": torch.ones(shape)}
    with pytest.raises(CheckpointMismatchError, match=r"body\.weight has the shape") as caught:
        load_state(model, stored)
    assert str(shape) in str(caught.value)
    assert "(3, 2) in the model" in str(caught.value)


def test_a_model_computes_where_its_weights_are(model: Model) -> None:
    assert device_of(model) == torch.device("cpu")
    assert device_of(model.to("meta")) == torch.device("meta")


def test_weights_that_rest_in_main_memory_are_computed_with_where_they_are_gathered(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what `fully_shard` with offloading makes of a weight
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    mesh = DeviceMesh("cuda", [0], _init_backend=False, _rank=0)
    weight = model.head.weight.detach()
    form = TensorMeta(weight.shape, weight.stride(), weight.dtype)
    split = DTensor(weight, DTensorSpec(mesh, (Replicate(),), form), requires_grad=True)
    model.head.weight = nn.Parameter(split)
    assert model.head.weight.device == torch.device("cpu")
    assert device_of(model) == torch.device("cuda:3")


def test_pieces_of_weights_are_computed_with_where_deepspeed_gathers_them(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero, "device", lambda: torch.device("cuda:2"))
    model.head.weight.ds_id = 1
    assert device_of(model) == torch.device("cuda:2")
