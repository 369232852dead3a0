"""Gradients reduced with each micro-batch are those that are reduced once a step."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from lrlhf.run.gradient_updates import reduces_each
from lrlhf.strategies import FSDP2
from tests.distributed.strategy_runs import MODULES
from tests.strategies.test_fsdp import assert_close, fit

GIB = 2**30


@pytest.mark.parametrize(
    ("choice", "gradients", "device", "expected"),
    [
        ("auto", 20 * GIB, 80 * GIB, False),  # a quarter of 80 and no more
        ("auto", 20 * GIB + 1, 80 * GIB, True),
        ("auto", 20 * GIB + 1, None, False),
        (True, 1, None, True),
        (False, 100 * GIB, 80 * GIB, False),
    ],
)
def test_whole_gradients_may_take_a_quarter_of_a_device(
    choice: Any, gradients: int, device: int | None, expected: bool
) -> None:
    assert reduces_each(choice, gradients, device) is expected


class Watched(FSDP2):
    """Notes after each micro-batch but the last what is kept whole, or in part, of gradients."""

    seen: Path

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with super().block_backward_sync():
            yield
        module: Any = self.lightning_module
        states = [part._get_fsdp_state() for part in module.modules() if _is_split(part)]
        groups = [group for state in states for group in state._fsdp_param_groups]
        params = [param for group in groups for param in group.fsdp_params]
        kept = {
            "whole": any(_whole_gradient(param) is not None for param in params),
            "own": any(param.sharded_param.grad is not None for param in params),
            "of the group": any(group._partial_reduce_output is not None for group in groups),
        }
        with self.seen.open("a") as file:
            file.write(json.dumps([name for name, there in kept.items() if there]) + "\n")


def _whole_gradient(param: Any) -> Any:
    # a copy only where gradients are added up in another precision
    other = param.unsharded_accumulated_grad
    return param.unsharded_param.grad if other is None else other


def _is_split(part: object) -> bool:
    return isinstance(part, FSDPModule)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"reduce_each_micro_batch": True}, {"own"}),
        ({"reduce_each_micro_batch": False}, {"whole"}),
        ({}, {"whole"}),  # auto, on CPUs
        # two copies: what a copy has added up goes to the other with the last micro-batch
        ({"reduce_each_micro_batch": True, "shard_group": 1}, {"of the group"}),
    ],
)
def test_every_way_takes_the_same_steps_and_keeps_what_it_says(
    options: dict[str, Any], kept: set[str], model_folder: str, tmp_path: Path
) -> None:
    build = MODULES["rloo"]  # clips, and has several micro-batches to a step
    (one,) = fit(build(Path(model_folder)), tmp_path / "one", ranks=1, steps=2)
    strategy = Watched(start_method="fork", timeout=60, **options)
    strategy.seen = tmp_path / "seen"
    for end in fit(build(Path(model_folder)), tmp_path / "two", strategy=strategy, steps=2):
        assert_close(one["weights"], end["weights"])
    seen = [set(json.loads(line)) for line in strategy.seen.read_text().splitlines()]
    assert len(seen) >= 4  # on each rank in each step
    assert all(each == kept for each in seen)


def test_the_choice_is_said_once_and_is_one_for_each_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Model:
        def __init__(self, size: int) -> None:
            self.size, self.held = size, ""

        def parameters(self) -> list[Any]:
            return [type("Weight", (), {"requires_grad": True, "nbytes": self.size})()]

        def set_requires_gradient_sync(self, on: bool) -> None:
            self.held += f"whole {on}, "

        def set_requires_all_reduce(self, on: bool) -> None:
            self.held += f"between groups {on}, "

    large, small = Model(30 * GIB), Model(GIB)
    monkeypatch.setattr("lrlhf.strategies.fsdp.device_memory", lambda _: 80 * GIB)
    monkeypatch.setattr(
        "lrlhf.strategies.fsdp.trained_models", lambda _: {"policy": large, "critic": small}
    )
    strategy = FSDP2()
    monkeypatch.setattr(strategy, "broadcast", lambda value: value)
    monkeypatch.setattr(type(strategy), "root_device", None)
    caplog.set_level(logging.INFO)
    for _ in range(2):
        with strategy.block_backward_sync():
            assert large.held.endswith("between groups False, ")
            assert small.held.endswith("whole False, ")
    assert large.held == "between groups False, between groups True, " * 2
    assert small.held == "whole False, whole True, " * 2
    said = [record.getMessage() for record in caplog.records if "fsdp2" in record.getMessage()]
    assert said == [
        "fsdp2 reduces gradients of policy, 30 GiB if whole, with each micro-batch",
        "fsdp2 reduces gradients of critic, 1 GiB if whole, once a step",
    ]
