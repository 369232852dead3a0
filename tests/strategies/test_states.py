"""States of optimizers go by the names of parameters, and fit them or are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lrlhf.models.sharding import CheckpointMismatchError
from lrlhf.run.checkpoints.sharded_checkpoint import (
    load_optimizer_state,
    optimizer_state,
    stored_names,
)


class Two(L.LightningModule):
    """A matrix and a vector of as many entries as it has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.second = nn.Linear(2, 1, bias=False)


def adamw(module: Two, *, swapped: bool = False, one_group: bool = False) -> Optimizer:
    decayed = [module.first.weight, module.second.weight]
    if swapped:
        decayed.reverse()
    if one_group:
        return AdamW([*decayed, module.first.bias], lr=0.1)
    return AdamW(
        [{"params": decayed, "weight_decay": 0.5}, {"params": [module.first.bias], "lr": 0.3}],
        lr=0.1,
        weight_decay=0.0,
    )


def stepped(module: Two, optimizer: Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        for index, weight in enumerate(module.parameters()):
            generator = torch.Generator().manual_seed(10 * step + index)
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()


def moments(module: Two, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    return {name: dict(optimizer.state[weight]) for name, weight in module.named_parameters()}


def trained() -> tuple[Two, Optimizer]:
    module = Two()
    optimizer = adamw(module)
    stepped(module, optimizer)
    return module, optimizer


def assert_same_moments(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert values.keys() == other[name].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in values.items():
            assert torch.equal(value, other[name][key]), (name, key)


def test_a_state_names_its_parameters() -> None:
    module, optimizer = trained()
    state = optimizer_state(module, optimizer)
    assert set(state["state"]) == {"first.weight", "first.bias", "second.weight"}
    named = [
        (group["params"], group["lr"], group["weight_decay"]) for group in state["param_groups"]
    ]
    assert named == [(["first.weight", "second.weight"], 0.1, 0.5), (["first.bias"], 0.3, 0.0)]
    assert state["state"]["first.bias"]["step"].item() == 2


@pytest.mark.parametrize("by", [optimizer_state, lambda _, optimizer: optimizer.state_dict()])
def test_names_and_numbers_restore_the_same(by: Callable[..., dict[str, Any]]) -> None:
    module, optimizer = trained()
    other = Two()
    fresh = adamw(other)
    fresh.param_groups[0]["lr"] = 9.0
    load_optimizer_state(other, fresh, copy.deepcopy(by(module, optimizer)))
    assert_same_moments(moments(other, fresh), moments(module, optimizer))
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.3]
    # and both go on alike
    other.load_state_dict(module.state_dict())
    stepped(module, optimizer)
    stepped(other, fresh)
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_by_name_the_order_of_parameters_does_not_matter() -> None:
    module, optimizer = trained()
    other = Two()
    fresh = adamw(other, swapped=True)
    load_optimizer_state(other, fresh, optimizer_state(module, optimizer))
    assert_same_moments(moments(other, fresh), moments(module, optimizer))


def test_parameters_without_a_state_and_entries_that_are_no_tensors_come_through() -> None:
    module, other = Two(), Two()
    optimizer, fresh = adamw(module), adamw(other)
    load_optimizer_state(other, fresh, optimizer_state(module, optimizer))
    assert not fresh.state  # before the first step
    module.first.bias.grad = torch.ones(2)
    optimizer.step()
    load_optimizer_state(other, fresh, optimizer_state(module, optimizer))
    assert set(fresh.state) == {other.first.bias}
    # SGD keeps None for a parameter without momentum
    sgd, fresh = SGD(module.parameters(), lr=0.1), SGD(other.parameters(), lr=0.5)
    stepped(module, sgd)
    load_optimizer_state(other, fresh, optimizer_state(module, sgd))
    assert all(value == {"momentum_buffer": None} for value in fresh.state.values())
    assert fresh.param_groups[0]["lr"] == 0.1


def test_the_state_of_other_parameters_is_refused() -> None:
    module, optimizer = trained()
    state = optimizer_state(module, optimizer)
    smaller = AdamW([module.first.weight])
    with pytest.raises(CheckpointMismatchError, match="has 3 parameters and this one 1"):
        load_optimizer_state(module, smaller, state)
    with pytest.raises(CheckpointMismatchError, match="2 groups of parameters and this one 1"):
        load_optimizer_state(module, adamw(module, one_group=True), state)
    state["param_groups"][1]["params"] = ["elsewhere.bias"]
    state["state"]["elsewhere.bias"] = state["state"].pop("first.bias")
    with pytest.raises(CheckpointMismatchError, match=r"elsewhere\.bias"):
        load_optimizer_state(module, adamw(module), state)


def test_numbers_stand_for_parameters_in_the_order_of_the_groups() -> None:
    stored = {"state": {}, "param_groups": [{"params": [0, 2]}, {"params": [1]}]}
    # Lightning's numbers count through the groups, whatever they are
    optimizer = adamw(Two())  # of two groups
    assert stored_names(stored, optimizer, ["a", "b", "c"]) == {"a": 0, "b": 2, "c": 1}
