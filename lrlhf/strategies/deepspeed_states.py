"""Weights and optimizer states of DeepSpeed's engines, by their names in the module.

The master weights of what is trained are in 32 bits. A tensor that was put together is whole on
one rank, a different one for each, and on the meta device on the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lrlhf.models import zero
from lrlhf.models.sharding import load_state
from lrlhf.run.checkpoints.optimizer_states import stored_names
from lrlhf.strategies.deepspeed_engine import Place, TrainedEngine


class Assembly:
    """Puts tensors together, each on the rank that has the least so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        several = torch.distributed.is_initialized()
        self._rank = torch.distributed.get_rank() if several else 0
        self._load = [0] * (torch.distributed.get_world_size() if several else 1)

    @torch.no_grad()
    def put_together(self, share: Tensor, start: int, shape: torch.Size) -> Tensor:
        """Return a tensor of ``shape`` of which this rank has the entries from ``start`` on."""
        owner = self._next_owner(shape.numel() * share.element_size())
        whole = torch.zeros(shape.numel(), dtype=share.dtype, device=self._device)
        whole[start : start + share.numel()] = share
        if len(self._load) > 1:
            # bytes that one rank has and the others have as 0 add up without rounding
            torch.distributed.reduce(whole.view(torch.uint8), dst=owner)
        return self._kept(whole.view(shape), owner)

    def keep(self, whole: Tensor) -> Tensor:
        """Keep a tensor that every rank has on one of them."""
        return self._kept(whole, self._next_owner(whole.numel() * whole.element_size()))

    def _next_owner(self, size: int) -> int:
        owner = self._load.index(min(self._load))
        self._load[owner] += size
        return owner

    def _kept(self, whole: Tensor, owner: int) -> Tensor:
        if owner != self._rank:
            return torch.empty(whole.shape, dtype=whole.dtype, device="meta")
        return whole.detach().to("cpu", copy=True)


def module_state(
    module: L.LightningModule, engines: Sequence[TrainedEngine], device: torch.device
) -> dict[str, Any]:
    """Return the weights and buffers of a module; all ranks must call it."""
    assembly = Assembly(device)
    known: dict[int, Tensor] = {}  # a tied weight has several names
    state: dict[str, Any] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            if id(tensor) not in known:
                known[id(tensor)] = _assembled(tensor, engines, assembly)
            state[name] = known[id(tensor)]
        else:
            state[name] = tensor
    return state


def _assembled(tensor: Any, engines: Sequence[TrainedEngine], assembly: Assembly) -> Tensor:
    shape = zero.shape_of(tensor)
    engine = _engine_of(tensor, engines)
    if engine is not None:
        place = engine.place(tensor)
        return assembly.put_together(place.of(place.flat), place.start, shape)
    if zero.is_partitioned(tensor):
        start = zero.start_of_partition(tensor)
        own = tensor.ds_tensor[: max(0, tensor.ds_numel - start)]
        return assembly.put_together(own, start, shape)
    return assembly.keep(tensor)


@torch.no_grad()
def load_module_state(
    module: L.LightningModule,
    engines: Sequence[TrainedEngine],
    stored: Mapping[str, Tensor],
    *,
    strict: bool,
) -> None:
    """Copy stored weights, whole by name, into a module, each rank its own share.

    Raises:
        CheckpointMismatchError: Shapes differ, or with ``strict`` names.
    """
    load_state(module, stored, strict=strict, write=partial(_write, engines=engines))


def _write(target: Tensor, value: Tensor, *, engines: Sequence[TrainedEngine]) -> None:
    engine = _engine_of(target, engines)
    if engine is not None:
        place = engine.place(target)
        place.of(place.flat).copy_(place.cut(value))
    if zero.is_partitioned(target):
        zero.local_partition(target).copy_(zero.partition_of(target, value))
    else:
        target.detach().copy_(value)


def optimizer_state(
    engine: TrainedEngine, names: Mapping[int, str], device: torch.device
) -> dict[str, Any]:
    """Return the state of an engine's optimizer; all ranks must call it.

    ``names`` are by the id of the parameter; tensors are put together on ``device``.

    Raises:
        ValueError: The optimizer keeps something that is neither per entry nor a number.
    """
    assembly = Assembly(device)
    state: dict[str, dict[str, Any]] = {}
    for weight in chain.from_iterable(engine.groups):
        place = engine.place(weight)
        values = engine.base.state.get(place.flat, {})
        if values:
            shape = zero.shape_of(weight)
            state[names[id(weight)]] = {
                key: _state_value(key, value, place, shape, assembly)
                for key, value in values.items()
            }
    groups = [
        {**options, "params": [names[id(weight)] for weight in weights]}
        for options, weights in zip(engine.base.param_groups, engine.groups, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def _state_value(key: str, value: Any, place: Place, shape: torch.Size, assembly: Assembly) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == place.flat.shape:
        return assembly.put_together(place.of(value), place.start, shape)
    if value.ndim == 0:
        return value.detach().cpu().clone()
    raise ValueError(
        f"the optimizer keeps {key!r} of shape {tuple(value.shape)}, which DeepSpeed cannot split "
        "over ranks; take one with one value per weight, such as AdamW"
    )


@torch.no_grad()
def load_optimizer_state(
    engine: TrainedEngine, names: Mapping[int, str], stored: Mapping[str, Any]
) -> None:
    """Restore what `optimizer_state` returned, or what another strategy saved, tensors whole.

    Raises:
        CheckpointMismatchError: It is the state of other parameters.
    """
    weights = list(chain.from_iterable(engine.groups))
    keys = stored_names(stored, engine.base, [names[id(weight)] for weight in weights])
    for group, old in zip(engine.base.param_groups, stored["param_groups"], strict=True):
        group.update({key: value for key, value in old.items() if key != "params"})
    numbers: dict[Tensor, dict[str, list[Any]]] = {}
    for weight in weights:
        entries = stored["state"].get(keys[names[id(weight)]], {})
        place = engine.place(weight)
        for key in entries:
            number = _restore(engine, place, zero.shape_of(weight), key, entries[key])
            if number is not None:
                numbers.setdefault(place.flat, {}).setdefault(key, []).append(number)
    for flat, lists in numbers.items():
        number = next(engine.group_of[id(one)] for one in weights if engine.place(one).flat is flat)
        group = engine.base.param_groups[number]
        for key, several in lists.items():
            engine.base.state[flat][key] = _common(key, several, flat, group)


def _restore(engine: TrainedEngine, place: Place, shape: torch.Size, key: str, value: Any) -> Any:
    """Write a value per entry into its place; returns any other value."""
    if not isinstance(value, Tensor) or key == "step" or value.shape != shape:
        return value
    state = engine.base.state[place.flat]
    if key not in state:
        state[key] = torch.zeros_like(place.flat, requires_grad=False)
    place.of(state[key]).copy_(place.cut(value))
    return None


def _common(key: str, values: list[Any], flat: Tensor, group: Mapping[str, Any]) -> Any:
    """Return the one number that a row of parameters shares, such as the steps taken."""
    numbers = [float(value) for value in values]
    if min(numbers) != max(numbers):
        rank_zero_warn(
            f"the checkpoint's optimizer has {key!r} from {min(numbers):g} to {max(numbers):g}, "
            "which DeepSpeed keeps once for all parameters of a group: the largest is taken"
        )
    value = values[numbers.index(max(numbers))]
    if not isinstance(value, Tensor):
        return value
    on_device = group.get("fused") or group.get("capturable")
    return value.detach().to(flat.device if on_device else "cpu", copy=True)


def _engine_of(tensor: Tensor, engines: Sequence[TrainedEngine]) -> TrainedEngine | None:
    return next((engine for engine in engines if id(tensor) in engine.group_of), None)
