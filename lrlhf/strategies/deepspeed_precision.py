"""Backward passes and steps as Lightning asks for them, run by DeepSpeed's engines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import lightning as L
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn

from lrlhf.run.lightning_internals import after_closure
from lrlhf.strategies.deepspeed_engine import TrainedEngine


class HasEngines(Protocol):
    """A strategy with an engine per trained model."""

    def run_backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of every trained model that a loss reaches."""
        ...

    def engine_of(self, optimizer: Any) -> TrainedEngine:
        """Return the engine that an optimizer belongs to."""
        ...


class EnginePrecision(DeepSpeedPrecision):
    """Backward and step through the strategy's engines; nothing else is converted here.

    Lightning's own turns every number of a batch into bfloat16, scores and margins too.

    Args:
        precision: ``trainer.precision``.
        strategy: Has the engines.

    Raises:
        ValueError: The precision needs a loss scale.
    """

    def __init__(self, precision: Any, strategy: HasEngines) -> None:
        if precision in ("16-mixed", "16-true"):
            raise ValueError(
                f"trainer.precision is {precision}: DeepSpeed's loss scale and steps that are left "
                "out because of a gradient that is not finite do not go together; use bf16-mixed"
            )
        super().__init__(precision)
        self._strategy = strategy

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module  # the engines do it, and keep a copy in 32 bits

    def convert_input(self, data: Any) -> Any:
        return data

    def tensor_init_context(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: L.LightningModule,
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        del model, optimizer, args, kwargs
        self._strategy.run_backward(tensor)

    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Any,
        model: L.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        del kwargs
        engine = self._strategy.engine_of(optimizer)
        result = closure()
        if model.automatic_optimization and result is None:
            raise ValueError(
                "training_step returned None; DeepSpeed needs a loss from every process"
            )
        engine.reduce()
        after_closure(self, model, optimizer)
        engine.step()
        return result

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if not clip_val:
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            raise ValueError(
                "trainer.gradient_clip_algorithm is value, which DeepSpeed does not support; "
                "use norm"
            )
        gradients = self._strategy.engine_of(optimizer)
        norm = gradients.norm()
        gradients.scale(torch.clamp(clip_val / (norm + 1e-6), max=1.0))
