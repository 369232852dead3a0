"""States of optimizers in one form, whichever strategy holds them.

Parameters go by their names in the module. A tensor is a `DTensor`
where it is split, whole where every rank has it, and on the meta device where another rank has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import lightning as L
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lrlhf.models.sharding import CheckpointMismatchError, check_same_names, stored_like


def optimizer_state(module: L.LightningModule, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state with its parameters under their names."""
    plain = _plain(optimizer)
    names: dict[Tensor, str] = {weight: name for name, weight in module.named_parameters()}
    groups = [
        {**group, "params": [names[parameter] for parameter in group["params"]]}
        for group in plain.param_groups
    ]
    state = {names[parameter]: dict(values) for parameter, values in plain.state.items()}
    return {"state": state, "param_groups": groups}


def load_optimizer_state(
    module: L.LightningModule, optimizer: Optimizer, stored: Mapping[str, Any]
) -> None:
    """Restore what `optimizer_state` returned, or Lightning's own form of it.

    Raises:
        CheckpointMismatchError: It is the state of other parameters.
    """
    plain = _plain(optimizer)
    own = [parameter for group in plain.param_groups for parameter in group["params"]]
    names: dict[Tensor, str] = {weight: name for name, weight in module.named_parameters()}
    saved = stored_names(stored, plain, [names[parameter] for parameter in own])
    position = {saved[names[parameter]]: index for index, parameter in enumerate(own)}
    state = {
        position[key]: {name: stored_like(values, name, own[position[key]]) for name in values}
        for key, values in stored["state"].items()
    }
    counter = iter(range(len(own)))
    groups = [
        {**old, "params": [next(counter) for _ in group["params"]]}
        for old, group in zip(stored["param_groups"], plain.param_groups, strict=True)
    ]
    plain.load_state_dict({"state": state, "param_groups": groups})


def stored_names(stored: Mapping[str, Any], optimizer: Optimizer, own: list[str]) -> dict[str, Any]:
    """Map ``own`` names, in order, to what stands for each in a stored state: itself, or a number.

    Raises:
        CheckpointMismatchError: The parameters are others.
    """
    keys = list(chain.from_iterable(group["params"] for group in stored["param_groups"]))
    if len(keys) != len(own):
        raise CheckpointMismatchError(
            f"the checkpoint's optimizer has {len(keys)} parameters and this one {len(own)}; "
            "resume with the model (and LoRA settings) that the run was started with"
        )
    groups, own_groups = len(stored["param_groups"]), len(optimizer.param_groups)
    if groups != own_groups:
        raise CheckpointMismatchError(
            f"the checkpoint's optimizer has {groups} groups of parameters and this one "
            f"{own_groups}; resume with the optimizer settings that the run was started with"
        )
    if all(isinstance(key, str) for key in keys):
        check_same_names("the checkpoint's optimizer", keys, own)
        return {name: name for name in own}
    return dict(zip(own, keys, strict=True))


def _plain(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
