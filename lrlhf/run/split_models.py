"""What a strategy asks of a module."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import lightning as L
from torch import nn

from lrlhf.models import is_compiled


@runtime_checkable
class Trains(Protocol):
    """A module that names the models it trains."""

    def trainable_models(self) -> dict[str, nn.Module]:
        """Models that receive gradients, by role, in the order of their optimizers."""
        ...


@runtime_checkable
class SplitsModels(Protocol):
    """A strategy that can split a model which is not trained."""

    def shard_frozen(self, model: nn.Module, *, whole: bool = False) -> None:
        """Have a model compute as trained ones do, in place, and unless ``whole`` split it."""
        ...


def leave_inference_mode(trainer: L.Trainer) -> None:
    """Evaluate under ``no_grad``: weights gathered in inference mode cannot be trained with."""
    trainer.fit_loop.epoch_loop.val_loop.inference_mode = False
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


def refuse_quantised(model: nn.Module, strategy: str, remedy: str) -> None:
    """Refuse to split weights that are more than their entries.

    Raises:
        ValueError: Some are quantised.
    """
    if {type(weight).__name__ for weight in model.parameters()} & {"Params4bit", "Int8Params"}:
        raise ValueError(
            f"{strategy} cannot split weights that are quantised (quantization: 4bit or 8bit); "
            f"drop quantization, or {remedy}"
        )


def refuse_compiled(model: nn.Module, strategy: str, remedy: str) -> None:
    """Refuse a model whose compiled layers would wait for weights that hooks gather.

    Raises:
        ValueError: Its layers are compiled.
    """
    if is_compiled(model):
        raise ValueError(
            f"{strategy} gathers weights inside of layers, which cannot be compiled then; "
            f"set compile: false, or {remedy}"
        )


def trained_models(module: L.LightningModule | None) -> dict[str, nn.Module]:
    """Return a module's trained models by role.

    Raises:
        TypeError: It does not name them.
    """
    if not isinstance(module, Trains):
        raise TypeError(
            f"{type(module).__name__} has no trainable_models(), which this strategy needs to "
            "know what to split; subclasses of lrlhf.modules.TrainingModule have it"
        )
    return module.trainable_models()
