import math
from typing import Any

import pytest
import torch
from torch import nn

from lrlhf.modules.optimizers import OptimizerConfig, parameter_groups


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))


def test_only_matrices_decay() -> None:
    matrices, others = parameter_groups(model().named_parameters(), weight_decay=0.5)
    assert [tuple(p.shape) for p in matrices["params"]] == [(2, 3)]
    assert matrices["weight_decay"] == 0.5
    assert [tuple(p.shape) for p in others["params"]] == [(2,), (2,), (2,)]
    assert others["weight_decay"] == 0.0
    # a matrix moves without a gradient, and a bias does not
    network = nn.Linear(1, 1)
    nn.init.ones_(network.weight)
    nn.init.ones_(network.bias)
    optimizer, _ = OptimizerConfig(lr=0.1, weight_decay=0.5).build(network.named_parameters(), 1)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert network.weight.item() == pytest.approx(1 - 0.1 * 0.5)
    assert network.bias.item() == 1.0


def test_frozen_parameters_are_left_out_and_a_wholly_frozen_model_is_refused() -> None:
    network = model()
    network[0].requires_grad_(requires_grad=False)
    optimizer, _ = OptimizerConfig().build(network.named_parameters(), 1)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in network[1].parameters()}
    with pytest.raises(ValueError, match="no parameter requires gradients"):
        OptimizerConfig().build(network.requires_grad_(False).named_parameters(), 1)


@pytest.mark.parametrize(
    ("name", "options", "own"),
    [
        ("AdamW", {"betas": (0.5, 0.6), "eps": 1e-3, "fused": False}, {}),
        ("SGD", {"optimizer_class": "torch.optim.SGD"}, {"momentum": 0.7}),
    ],
)
def test_an_optimizer_gets_its_options(
    name: str, options: dict[str, Any], own: dict[str, Any]
) -> None:
    config = OptimizerConfig(lr=0.1, weight_decay=0.2, optimizer_options=own, **options)
    optimizer, _ = config.build(model().named_parameters(), 1)
    assert type(optimizer).__name__ == name
    expected = {"lr": 0.1} | options | own
    expected.pop("optimizer_class", None)
    assert all(expected.items() <= group.items() for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]


def test_own_options_come_before_those_of_the_config_and_of_the_module() -> None:
    config = OptimizerConfig(lr=0.1, warmup_steps=0, optimizer_options={"betas": (0.5, 0.6)})
    optimizer, _ = config.build(model().named_parameters(), 1)
    assert optimizer.defaults["betas"] == (0.5, 0.6)
    filled = config.filled(lr=0.3, warmup_steps=7)
    assert (filled.lr, filled.warmup_steps) == (0.1, 0)
    default = OptimizerConfig().filled(lr=0.3, warmup_steps=7)
    assert (default.lr, default.warmup_steps) == (0.3, 7)


def test_parts_of_a_model_have_rates_of_their_own() -> None:
    optimizer, _ = OptimizerConfig(lr=0.1).build(model().named_parameters(), 1, lrs={"1.": 0.02})
    rates = {tuple(p.shape): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    norm = [g["lr"] for g in optimizer.param_groups if len(g["params"]) == 2]
    assert rates[2, 3] == 0.1
    assert norm == [0.02]


@pytest.mark.parametrize(
    ("options", "total", "expected"),
    [
        ({}, 3, [1.0, 1.0, 1.0]),
        ({"warmup_steps": 3}, math.inf, [0.25, 0.5, 0.75, 1.0, 1.0]),
        # 0.15 of 10 steps: 1.5, so 2 steps
        ({"warmup_steps": 0.15}, 10, [1 / 3, 2 / 3, 1.0, 1.0]),
        # 4 steps from 1 to 0.2: 0.2 less at each
        ({"schedule": "linear", "min_lr_fraction": 0.2}, 4, [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        (
            # warm-up 1/2; then cos at 0, 1/4, 1/2, 3/4, 1 of the way: (1 + 2**-0.5) / 2 = 0.85355
            {"schedule": "cosine", "warmup_steps": 1, "min_lr_fraction": 0.1},
            5,
            [0.5, 1.0, 0.1 + 0.9 * 0.8535534, 0.55, 0.1 + 0.9 * 0.1464466, 0.1],
        ),
    ],
)
def test_schedules_by_hand(options: dict[str, Any], total: float, expected: list[float]) -> None:
    config = OptimizerConfig(lr=1.0, **options)
    optimizer, scheduler = config.build(model().named_parameters(), total)
    rates = []
    for _ in expected:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "optimizer.lr is 0.0"),
        ({"lr": math.nan}, "optimizer.lr is nan"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay"),
        ({"min_lr_fraction": 1.5}, "optimizer.min_lr_fraction"),
        ({"schedule": "cosin"}, "schedule: expected one of constant, linear, cosine, got 'cosin'"),
        ({"warmup_steps": -1}, "optimizer.warmup_steps"),
        ({"warmup_steps": 2.5}, "optimizer.warmup_steps is 2.5"),
        ({"optimizer_class": "torch.optim.SGD", "betas": (0.5, 0.9)}, "optimizer.betas belongs"),
        ({"optimizer_class": "torch.optim.SGD", "fused": True}, "optimizer.fused belongs"),
        # what shows when it is built, for a run without an end
        ({"schedule": "cosine"}, "schedule 'cosine'.*max_steps"),
        ({"warmup_steps": 0.1}, "warmup_steps 0.1.*max_steps"),
        ({"optimizer_class": "torch.optim.Nope"}, "'torch.optim.Nope' cannot be imported"),
        ({"optimizer_class": "torch.nn.Linear"}, "is no torch.optim.Optimizer"),
        ({"optimizer_options": {"speed": 3}}, r"\['speed'\] do not fit torch.optim.AdamW"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**options).build(model().named_parameters(), math.inf)


def test_the_schedule_continues_from_a_state_dict_and_follows_a_longer_run() -> None:
    config = OptimizerConfig(lr=1.0, schedule="linear")
    _, first = config.build(model().named_parameters(), 4)
    _, resumed = config.build(model().named_parameters(), 8)
    for scheduler, rates in ((first, [0.75, 0.5]), (resumed, [1 - 3 / 8])):
        scheduler.load_state_dict(first.state_dict())
        for rate in rates:
            scheduler.optimizer.step()
            scheduler.step()
            assert scheduler.get_last_lr()[0] == pytest.approx(rate)


def kernels(optimizer: torch.optim.Optimizer) -> set[bool | None]:
    return {group["fused"] for group in optimizer.param_groups}


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(2, 2, dtype=torch.bfloat16),
        torch.zeros(2, 2, dtype=torch.float64),
        torch.zeros(2, 3).T,
        torch.zeros(2, 2, device="meta"),
    ],
    ids=["bfloat16", "float64", "transposed", "meta"],
)
def test_adamw_is_left_to_torch_where_its_fused_kernel_might_do_otherwise(
    weight: torch.Tensor,
) -> None:
    optimizer, _ = OptimizerConfig().build([("weight", nn.Parameter(weight))], 1)
    assert kernels(optimizer) == {None}


def test_adamw_is_fused_where_nothing_is_said() -> None:
    for options, expected in (({}, True), ({"optimizer_options": {"foreach": True}}, None)):
        optimizer, _ = OptimizerConfig(**options).build(model().named_parameters(), 1)
        assert kernels(optimizer) == {expected}
    # a run that began with the plain kernel goes on with it
    network = model()
    began, _ = OptimizerConfig(fused=False).build(network.named_parameters(), 3)
    resumed, _ = OptimizerConfig().build(network.named_parameters(), 3)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    began.step()
    resumed.load_state_dict(began.state_dict())
    resumed.step()
    assert kernels(resumed) == {False}
    assert {float(state["step"]) for state in resumed.state.values()} == {2.0}


def test_a_loss_scaler_unscales_before_a_fused_step() -> None:
    # else Lightning would clip nothing, and the norm would be that of scaled gradients
    weight = nn.Parameter(torch.zeros(2, 2))
    optimizer, _ = OptimizerConfig(lr=1.0).build([("weight", weight)], 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(3.0 * weight.sum()).backward()
    scaler.unscale_(optimizer)
    assert weight.grad is not None
    assert weight.grad.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    scaler.step(optimizer)
    # the first step of AdamW is lr * sign(gradient)
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), -1.0))
