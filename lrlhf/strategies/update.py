"""How a loss becomes an optimizer step: what differs between Lightning's strategies.

Modules know only `backward` and `step`; a sharded strategy brings its own version.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn


class Updater(Protocol):
    """Backward and step of one optimizer at a time."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate gradients; ranks synchronise with the ``last`` micro-batch of a step."""
        ...

    def step(self, optimizer: LightningOptimizer, *, max_grad_norm: float) -> float:
        """Clip, step and clear; returns the gradient norm before clipping.

        A gradient that is not finite moves nothing: the step is left out on every rank alike,
        and the norm that is returned says so.
        """
        ...


class PlainUpdater:
    """One process, or DistributedDataParallel."""

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self._max_grad_norm = float("inf")
        self._norm = float("nan")

    def backward(self, loss: Tensor, *, last: bool) -> None:
        strategy = self._module.trainer.strategy
        quiet = isinstance(strategy, ParallelStrategy) and not last
        with strategy.block_backward_sync() if quiet else contextlib.nullcontext():  # type: ignore[attr-defined]
            self._module.manual_backward(loss)

    def step(self, optimizer: LightningOptimizer, *, max_grad_norm: float) -> float:
        self._max_grad_norm = max_grad_norm
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return self._norm

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip; to be called from ``on_before_optimizer_step``, where gradients are unscaled."""
        parameters = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        self._norm = float(norm)
        if not torch.isfinite(norm):
            for parameter in parameters:
                parameter.grad = None
        elif self._max_grad_norm < float("inf"):
            nn.utils.clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
