"""Models whose weights are split over ranks: how they are run, and how whole weights are seen.

FSDP2 turns a weight into a `DTensor`, ZeRO-3 into a flat piece. Both gather it with hooks on the
modules that hold it. Of a model that is not split, everything here is the identity.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from lrlhf.models import zero
from lrlhf.torch_internals import fsdp_dtype, fsdp_groups

ResultT = TypeVar("ResultT")
ModelT = TypeVar("ModelT", bound=nn.Module)


class CheckpointMismatchError(ValueError):
    """A checkpoint holds the state of another model than the one at hand."""


def within(model: nn.Module, compute: Callable[[], ResultT]) -> ResultT:
    """Run a function as if it were the forward pass of the outermost module.

    Log-probabilities are computed from parts of a model, its body and then, in chunks, its output
    head. The hooks that gather split weights, prepare their gradients and free them again are on
    the outermost module, and run only when that is called; what the function returns goes through
    them.
    """
    outer = vars(model).get("forward")

    def restore() -> None:
        vars(model).pop("forward", None)
        if outer is not None:
            model.forward = outer

    def forward() -> ResultT:
        restore()  # the function may call the model, which may be its own body
        return compute()

    model.forward = forward
    try:
        result: ResultT = model()
    finally:
        restore()
    return result


def class_of(model: ModelT) -> type[ModelT]:
    """Return a model's class; FSDP2 puts one of its own in front of it."""
    classes = type(model).__mro__
    return classes[2] if isinstance(model, FSDPModule) else type(model)


def is_split(weight: Tensor) -> bool:
    """Tell whether each rank holds only a part of a weight."""
    return isinstance(weight, DTensor) or zero.is_partitioned(weight)


def has_split_weights(model: nn.Module) -> bool:
    """Tell whether each rank holds only a part of some of a model's weights."""
    return any(isinstance(part, FSDPModule) for part in model.modules()) or any(
        zero.is_partitioned(weight) for weight in model.parameters()
    )


def device_of(model: nn.Module) -> torch.device:
    """Return the device that a model computes on, and that its inputs belong on.

    Weights that are split may rest in main memory, from where they are gathered.
    """
    for weight in model.parameters():
        if zero.is_partitioned(weight):
            return zero.device()
        kind = weight.device_mesh.device_type if isinstance(weight, DTensor) else "cpu"
        if kind != "cpu":
            return torch.device(kind, torch.accelerator.current_device_index())
    return next(model.parameters()).device


def reshard(model: nn.Module) -> None:
    """Free what was gathered, so that the model's parameters are the parts that are trained.

    Between a forward pass without gradients and the next backward pass FSDP2 leaves some weights
    whole; what is written into those would be lost.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    zero.reshard(model)


def full_tensor(weight: Tensor) -> Tensor:
    """Return a weight as it is on one device; all ranks must ask for it."""
    if isinstance(weight, DTensor):
        return weight.full_tensor()
    if zero.is_partitioned(weight):
        return zero.full_parameter(weight)
    return weight


def full_shape(weight: Tensor) -> torch.Size:
    """Return the shape of a weight as it is on one device."""
    return zero.shape_of(weight)


def own_part(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight, to be read or written in place, without gradient."""
    if isinstance(weight, DTensor):
        local: Tensor = weight.detach().to_local()  # type: ignore[attr-defined]
        return local
    if zero.is_partitioned(weight):
        return zero.local_partition(weight)
    return weight.detach()


def part_of(weight: Tensor, full: Tensor) -> Tensor:
    """Cut this rank's ``own_part(weight)`` out of a whole tensor, on the CPU or its device."""
    if isinstance(weight, DTensor):
        local: Tensor = like(weight, full).to_local()
        return local
    if zero.is_partitioned(weight):
        return zero.partition_of(weight, full)
    return full


def like(weight: DTensor, full: Tensor) -> DTensor:
    """Split a tensor that every rank has as ``weight`` is split."""
    on_device = full.to(weight.device)
    return distribute_tensor(on_device, weight.device_mesh, weight.placements, src_data_rank=None)


def of_parts(weight: Tensor, part: Tensor, *, holder: int) -> Tensor:
    """Describe for a checkpoint a part of what is split as ``weight`` is; all ranks must call it.

    A `DTensor` where the weight is one; the part where it is the whole; else the whole tensor, put
    together, on ranks other than ``holder`` on the meta device.
    """
    if isinstance(weight, DTensor):
        return DTensor.from_local(
            part.to(weight.device),
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
    if zero.is_partitioned(weight):
        tensor = zero.gather_partitions(weight, part)
        return tensor if torch.distributed.get_rank() == holder else tensor.to("meta")
    return part


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's state for a checkpoint, each tensor as `of_parts` describes it."""
    reshard(model)
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    state = model.state_dict(keep_vars=True)
    return {
        name: of_parts(value, own_part(value), holder=index % world)
        for index, (name, value) in enumerate(state.items())
    }


def _write_part(target: Tensor, value: Tensor) -> None:
    own_part(target).copy_(own_part(value) if is_split(value) else part_of(target, value))


@torch.no_grad()
def load_state(
    model: nn.Module,
    stored: Mapping[str, Tensor],
    *,
    strict: bool = True,
    write: Callable[[Tensor, Tensor], None] = _write_part,
) -> None:
    """Copy stored weights, whole tensors by name, into a model, each rank its own parts.

    Args:
        model: Whole or split.
        stored: Those of a tied weight are read once.
        strict: Refuse names that only one of the two has.
        write: Copies a stored tensor into a weight.

    Raises:
        CheckpointMismatchError: Names or shapes differ.
    """
    reshard(model)
    own = model.state_dict(keep_vars=True)
    if strict:
        check_same_names("the checkpoint", stored, own)
    seen: set[int] = set()
    for name, target in own.items():
        if name not in stored or id(target) in seen or not isinstance(target, Tensor):
            continue
        seen.add(id(target))
        value = stored_like(stored, name, target)
        if value.shape != full_shape(target):
            raise CheckpointMismatchError(
                f"{name} has the shape {tuple(value.shape)} in the checkpoint and "
                f"{tuple(full_shape(target))} in the model; resume with the model of that run"
            )
        write(target, value)


@runtime_checkable
class ReadsShards(Protocol):
    """Stored tensors of which a rank can read what belongs to it, and no more."""

    def read_like(self, name: str, weight: DTensor) -> DTensor | None:
        """Read this rank's part, split as ``weight`` is; None: it has another shape."""
        ...


def stored_like(stored: Mapping[str, Any], name: str, weight: Tensor) -> Any:
    """Return what is stored under a name, split as ``weight`` is if it has a value per entry."""
    if not isinstance(weight, DTensor):
        return stored[name]
    part = stored.read_like(name, weight) if isinstance(stored, ReadsShards) else None
    if part is not None:
        return part
    value = stored[name]
    per_entry = isinstance(value, Tensor) and value.shape == weight.shape
    return like(weight, value) if per_entry else value


def check_same_names(what: str, stored: Collection[str], own: Collection[str]) -> None:
    """Raise `CheckpointMismatchError` for names that are only in one of the two."""
    if different := sorted(set(stored) ^ set(own)):
        where = what if different[0] in stored else "the model"
        raise CheckpointMismatchError(
            f"only {where} has {different[0]!r} ({len(different)} names differ); resume with the "
            "model (and LoRA settings) that the run was started with"
        )


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Hold all weights whole on this rank; all ranks must enter and leave together.

    Inside, no forward pass waits for another rank, so each may run as many as it likes.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        with zero.gathered_for_generation(model):
            yield
        return
    _wake(model)
    groups = [group for module in modules for group in fsdp_groups(module)]
    # PyTorch has a setter for when weights are freed, and nothing to ask
    freed = [group.post_forward_mesh_info for group in groups]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for group, when in zip(groups, freed, strict=True):
            group.post_forward_mesh_info = when
        for module in modules:
            module.reshard()


def gathered_bytes(model: nn.Module) -> int:
    """Return the size of all split weights as `gathered` holds them."""
    narrowed = None
    if isinstance(model, FSDPModule):  # it has no other place that says it
        narrowed = fsdp_dtype(model)
    return sum(
        full_shape(weight).numel() * (narrowed or weight.dtype).itemsize
        for weight in model.parameters()
        if is_split(weight)
    )


@contextlib.contextmanager
def full_weights(module: nn.Module) -> Iterator[None]:
    """Put whole weights in the place of a layer's split ones, to be read, not to be run."""
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    for owner in module.modules():
        for name, weight in owner.named_parameters(recurse=False):
            if is_split(weight):
                replaced.append((owner, name, weight))
    try:
        for owner, name, weight in replaced:
            setattr(owner, name, nn.Parameter(full_tensor(weight).detach(), requires_grad=False))
        yield
    finally:
        for owner, name, weight in replaced:
            setattr(owner, name, weight)


def unshard(model: nn.Module) -> None:
    """Give a model that FSDP2 has split, settled, ordinary weights on the CPU; for all ranks."""
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in [*module.named_parameters(recurse=False)]:
            if isinstance(weight, DTensor):
                if id(weight) not in known:
                    data = weight.full_tensor().detach().cpu()
                    known[id(weight)] = nn.Parameter(data, requires_grad=weight.requires_grad)
                setattr(module, name, known[id(weight)])


def _wake(model: nn.Module) -> None:
    """Have FSDP2 find its root, which is the first module that it sees called."""
    if isinstance(model, FSDPModule):
        with torch.no_grad():
            within(model, lambda: None)
