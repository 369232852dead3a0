"""How losses become optimizer steps, whichever of Lightning's strategies is at work.

Modules know only `Updater`. A strategy that keeps gradients where the parameters do not show them
is one that `HoldsGradients`.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import Final, Literal, Protocol, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lrlhf.models.token_budget import memory_of
from lrlhf.torch_internals import multiply


class Gradients(Protocol):
    """The gradients of one optimizer's step, after they were reduced over the ranks."""

    def norm(self) -> Tensor:
        """Compute their norm over all parameters and ranks, the same everywhere; a scalar."""

    def scale(self, factor: float | Tensor) -> None:
        """Multiply them in place."""

    def drop(self) -> None:
        """Forget them: the step that follows moves nothing, no weight, moment or decay."""


@runtime_checkable
class HoldsGradients(Protocol):
    """A strategy whose gradients are not those of the parameters."""

    def gradients_of(self, optimizer: Optimizer) -> Gradients:
        """Return those that the optimizer's next step would take."""


class _OfParameters:
    """Gradients that lie beside their parameters: whole, or split in the same way."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._parameters: list[nn.Parameter] = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]

    @property
    def _tensors(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def norm(self) -> Tensor:
        norm = nn.utils.get_total_norm(self._tensors)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def scale(self, factor: float | Tensor) -> None:
        devices: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
        for gradient in self._tensors:
            devices[gradient.device].append(gradient)
        for device, gradients in devices.items():
            here = factor.to(device) if isinstance(factor, Tensor) else factor
            multiply(gradients, here)

    def drop(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def gradients_of(trainer: L.Trainer, optimizer: Optimizer) -> Gradients:
    """Return the gradients of an optimizer's next step, wherever the strategy keeps them."""
    strategy = trainer.strategy
    if isinstance(strategy, HoldsGradients):
        return strategy.gradients_of(optimizer)
    return _OfParameters(optimizer)


class Updater:
    """Backward and step of one optimizer at a time, by the strategy of a module's trainer."""

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self._max_grad_norm = float("inf")
        self._norm = float("nan")
        self._leave_out = False

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate gradients; ranks synchronise with the ``last`` micro-batch of a step."""
        strategy = self._module.trainer.strategy
        quiet = isinstance(strategy, ParallelStrategy) and not last
        with strategy.block_backward_sync() if quiet else contextlib.nullcontext():  # type: ignore[attr-defined]
            self._module.manual_backward(loss)

    def step(
        self, optimizer: LightningOptimizer, *, max_grad_norm: float, leave_out: bool = False
    ) -> float:
        """Clip to ``max_grad_norm``, step and clear; returns the gradient norm before clipping.

        A gradient that is not finite moves nothing: the step is left out on every rank alike, and
        the norm that is returned says so. With ``leave_out``, the same on every rank, the gradient
        is measured and nothing moves.
        """
        self._max_grad_norm, self._leave_out = max_grad_norm, leave_out
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return self._norm

    def before_step(self, optimizer: Optimizer) -> None:
        """Clip; to be called from ``on_before_optimizer_step``, where gradients are unscaled."""
        gradients = gradients_of(self._module.trainer, optimizer)
        norm = gradients.norm()
        self._norm = float(norm)
        if self._leave_out or not torch.isfinite(norm):
            gradients.drop()
            return
        # where nothing is to be clipped, that is not worth going through all gradients again
        factor = self._max_grad_norm / (norm + 1e-6)
        if float(factor) < 1.0:
            gradients.scale(factor)


_SHARE: Final = 0.25
"""Of a device's memory that whole gradients may take between micro-batches."""


def reduces_each(
    choice: Literal["auto"] | bool, whole_gradients: int, device_size: int | None
) -> bool:
    """Tell whether gradients are added up with each micro-batch, rather than with the last one.

    What is free at a moment plays no part: a run that is resumed has to choose the same again, as
    two orders of a sum round differently.

    Args:
        choice: ``auto``: by the sizes.
        whole_gradients: Bytes of those of one model, on one rank.
        device_size: Bytes of memory of a rank's device; None: a CPU, or not known.
    """
    if choice != "auto":
        return choice
    return device_size is not None and whole_gradients > _SHARE * device_size


def device_memory(device: torch.device) -> int | None:
    """Return the bytes of memory that a GPU has in all; None: it is no GPU of CUDA."""
    memory = memory_of(device)
    return None if memory is None else memory.size()
