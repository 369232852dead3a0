"""What this library does with private parts of PyTorch; nothing else may touch them.

When PyTorch changes, this is the file to look at; `tests/test_layers.py` keeps it so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]  # documented to be there
from torch.optim import Optimizer, lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

READERS_OF_PICKLES = ("torch.serialization", "torch._weights_only_unpickler", "pickle")
"""Modules that raise any error where a file of weights is none."""

# ---------------------------------------------------------------- tensors


def multiply(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply tensors of one device in place, on a GPU all of them at once."""
    torch._foreach_mul_(tensors, factor)


def is_cast(operator: Any) -> bool:
    """Tell whether an operator copies a tensor to another dtype or device."""
    return operator is torch.ops.aten._to_copy.default


def local_slices(tensor: Any) -> tuple[slice, ...]:
    """Return where this rank's part of a `DTensor` begins and ends along every axis."""
    [chunk] = tensor.__create_chunk_list__()
    sizes = zip(chunk.offsets, chunk.sizes, strict=True)
    return tuple(slice(start, start + size) for start, size in sizes)


# ---------------------------------------------------------------- modules


def forward_hooks(module: nn.Module) -> Iterator[dict[int, Any]]:
    """Yield the hooks that run before a module's forward pass, then those that run after it."""
    yield module._forward_pre_hooks
    yield module._forward_hooks


def use_plain_parameters(module: nn.Module) -> None:
    """Have a module keep its parameters in an ordinary dictionary, not in one of another kind."""
    module._parameters = dict(module._parameters)


# ---------------------------------------------------------------- FSDP2


def fsdp_groups(module: Any) -> list[Any]:
    """Return the groups of weights that FSDP2 gathers together for a module."""
    return list(module._get_fsdp_state()._fsdp_param_groups)


def fsdp_dtype(module: Any) -> torch.dtype | None:
    """Return the dtype in which FSDP2 gathers the weights of a module; None: their own."""
    dtype: torch.dtype | None = module._get_fsdp_state()._mp_policy.param_dtype
    return dtype


# ---------------------------------------------------------------- optimizers and schedules


def leave_scale_to_caller(optimizer: Optimizer) -> None:
    """Have a fused optimizer not tell loss scalers that it divides by their scale itself."""
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def counts_steps_alone(scheduler: Any) -> bool:
    """Tell whether a schedule is PyTorch's and depends on nothing but the number of steps."""
    kind = type(scheduler)
    inner = vars(scheduler).get("_schedulers", ())
    return (
        kind.__module__ == lr_scheduler.__name__
        and kind is not lr_scheduler.ReduceLROnPlateau
        and all(map(counts_steps_alone, inner))
    )


def steps_of(state: Mapping[str, Any]) -> int:
    """Return how many steps the state of a schedule has counted; a chain counts none itself."""
    return int(state["last_epoch"] if "last_epoch" in state else steps_of(state["_schedulers"][0]))


def set_steps(scheduler: Any, steps: int) -> None:
    """Have the next step of a schedule be the one after a number of steps."""
    scheduler.last_epoch, scheduler._step_count = steps - 1, steps


# ---------------------------------------------------------------- processes


def gloo_group(
    store: Store, rank: int, size: int, *, hostname: str, timeout: timedelta
) -> ProcessGroupGloo:
    """Make a gloo group apart from the process's others, on the network interface of a host."""
    gloo: Any = ProcessGroupGloo  # incompletely declared by PyTorch
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=hostname)]
    group: ProcessGroupGloo = gloo(store, rank, size, options)
    return group
