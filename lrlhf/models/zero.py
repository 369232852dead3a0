"""Weights that DeepSpeed's ZeRO-3 has split into flat pieces, one per rank.

Between two passes a split weight is empty, and its piece lies in ``ds_tensor``; hooks on the
modules gather it for each use. The pieces of all ranks in a row are the flattened weight, padded to
the same length on each.

Nothing else may touch private parts of DeepSpeed; `tests/test_layers.py` keeps it so.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lrlhf.torch_internals import forward_hooks, use_plain_parameters

# what DeepSpeed leaves on modules, and would take for its own in the next run
_TRACES = (
    "_external_params",
    "_original_parameters",
    "all_parameters",
    "applied_pre_backward_ref_cnt",
    "ds_external_parameters",
    "ds_grads_remaining",
    "ds_id",
    "ds_inflight_param_registry",
    "ds_recompute_parameters",
    "post_bwd_fn",
    "pre_bwd_fn",
)

_offload_of = WeakIdKeyDictionary()
"""What gathers and frees each weight: a ``DeepSpeedZeRoOffload``."""


def load_deepspeed() -> Any:
    """Import DeepSpeed, which takes seconds, or raise `ImportError` if it is not installed."""
    try:
        return importlib.import_module("deepspeed")
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise ImportError(
            "this strategy needs the package deepspeed: pip install 'lrlhf[deepspeed]'"
        ) from error


def remember(model: nn.Module, offload: Any) -> None:
    """Note what gathers and frees the weights of a model that was just split."""
    for weight in model.parameters():
        _offload_of[weight] = offload


def is_partitioned(weight: Tensor) -> bool:
    """Tell whether ZeRO-3 has split a weight."""
    return "ds_id" in vars(weight)


def device() -> torch.device:
    """Return the device that split weights are gathered on, wherever their pieces lie."""
    return torch.device(load_deepspeed().accelerator.get_accelerator().current_device_name())


def shape_of(weight: Tensor) -> torch.Size:
    """Return a weight's shape, which a split one does not show."""
    return torch.Size(weight.ds_shape) if is_partitioned(weight) else weight.shape  # type: ignore[attr-defined]


def start_of_partition(weight: Any) -> int:
    """Return where in the flattened weight this rank's piece begins; padding may begin before."""
    start: int = weight.ds_zero_partition_rank * weight.ds_tensor.numel()
    return start


def full_parameter(weight: Tensor) -> Tensor:
    """Gather a copy of a weight; all ranks must ask for it."""
    return gather_partitions(weight, weight.ds_tensor)  # type: ignore[attr-defined]


def local_partition(weight: Tensor) -> Tensor:
    """Return this rank's flat piece, to be read or written; the last rank's may end in padding.

    Raises:
        RuntimeError: The weight is held whole by `gathered_for_generation`, which would not see
            what is written.
    """
    split: Any = weight
    if _is_held(split):
        raise RuntimeError("a weight's piece was asked for while the whole weight is held")
    if split.ds_status.name != "NOT_AVAILABLE":
        _offload_of[weight].partition_all_parameters()
    piece: Tensor = split.ds_tensor.detach()
    return piece


def partition_of(weight: Tensor, full: Tensor) -> Tensor:
    """Cut this rank's piece, padding included, out of a whole tensor of the weight's shape."""
    split: Any = weight
    start, length = start_of_partition(split), split.ds_tensor.numel()
    own = full.reshape(-1)[start : start + length]
    return nn.functional.pad(own, (0, length - own.numel()))


@torch.no_grad()
def gather_partitions(weight: Tensor, part: Tensor) -> Tensor:
    """Put all ranks' pieces, of a weight or of one value per entry, together in its shape."""
    split: Any = weight
    own = part.detach().to(device()).contiguous()
    pieces = own.new_empty(split.ds_zero_partition_world_size * own.numel())
    torch.distributed.all_gather_into_tensor(pieces, own, group=split.ds_process_group)
    return pieces[: split.ds_numel].view(split.ds_shape)


@contextlib.contextmanager
def gathered_for_generation(model: nn.Module) -> Iterator[None]:
    """Hold all weights whole, without any collective inside; all ranks enter and leave together."""
    weights = [weight for weight in model.parameters() if is_partitioned(weight)]
    if not weights or all(map(_is_held, weights)):
        yield
        return
    reshard(model)
    with torch.inference_mode(False), torch.no_grad():
        gathering = load_deepspeed().zero.GatheredParameters(weights)
        gathering.__enter__()
    try:
        with _without_hooks(_offloads_of(weights)):
            yield
    finally:
        with torch.no_grad():
            gathering.__exit__(None, None, None)


def reshard(model: nn.Module) -> None:
    """Free what was gathered, so that each weight is what its pieces say; not within a pass.

    Small weights stay whole between passes, and after a pass without gradients others are on their
    way.
    """
    weights = [weight for weight in model.parameters() if is_partitioned(weight)]
    for offload in _offloads_of([weight for weight in weights if not _is_held(weight)]):
        offload.partition_all_parameters()


def unshard(model: nn.Module) -> None:
    """Give a model ordinary weights on the CPU; all ranks must, and then close its engine."""
    reshard(model)
    gathered: dict[int, nn.Parameter] = {}
    for module in model.modules():
        use_plain_parameters(module)
        for name, weight in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if not is_partitioned(weight):
                continue
            if id(weight) not in gathered:
                data = full_parameter(weight).cpu().clone()
                gathered[id(weight)] = nn.Parameter(data, requires_grad=weight.requires_grad)
            setattr(module, name, gathered[id(weight)])
        for trace in _TRACES:
            vars(module).pop(trace, None)


def _offloads_of(weights: list[nn.Parameter]) -> list[Any]:
    return list({id(offload): offload for offload in map(_offload_of.get, weights)}.values())


def _is_held(weight: Tensor) -> bool:
    return bool(vars(weight).get("_ds_z3_gathered_param_context_depth", 0))


@contextlib.contextmanager
def _without_hooks(offloads: list[Any]) -> Iterator[None]:
    """Take off the hooks that gather and free; those of others stay."""
    removed: list[tuple[dict[int, Any], list[tuple[int, Any]]]] = []
    for offload in offloads:
        handles = [*offload.forward_hooks, *offload.backward_hooks, offload.fwd_pre_hook]
        ids = {handle.id for handle in handles}
        for module in offload.module.modules():
            for hooks in forward_hooks(module):
                removed.append((hooks, list(hooks.items())))
                for key in ids & hooks.keys():
                    del hooks[key]
    try:
        yield
    finally:
        for hooks, items in reversed(removed):
            hooks.clear()
            hooks.update(items)


# ---------------------------------------------------------------- engines


def begin_backward(engine: Any) -> None:
    """Do what the forward pass of DeepSpeed's own wrapper does for the backward pass."""
    engine.optimizer.clear_backward_seen_flag()
    engine._backward_prologue()


def end_backward(optimizer: Any) -> None:
    """Leave a backward pass; one that reached the model has left by itself."""
    if optimizer._hooks_fired_this_backward == 0:
        optimizer.exit_backward()


def average_gradients(engine: Any) -> None:
    """Average the gradients of ZeRO-1, which does it in the step."""
    engine._running_engine_step = True
    try:
        engine.optimizer.setup_buckets()
        engine.allreduce_gradients()
    finally:
        engine._running_engine_step = False


def take_step(engine: Any) -> None:
    """Move the weights by the averaged gradients."""
    engine._take_model_step(None)


def forget_offloaded(optimizer: Any, stage: int) -> None:
    """Forget whose gradients were moved to the CPU."""
    if stage == 3:
        optimizer._offload_boundary_param_ids = set()
    else:
        optimizer._offload_accumulated_param_ids = set()


def fragment_of(weight: Any) -> Any:
    """Return where ZeRO-1 and -2 keep this rank's share of a weight; None: other ranks have it."""
    return weight._hp_mapping
