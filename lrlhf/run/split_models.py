"""What strategies ask of a module, and what they mind."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import nn

from lrlhf.models import is_compiled
from lrlhf.run.lightning_internals import looks_for_unused_parameters


@runtime_checkable
class Trains(Protocol):
    """A module that names the models it trains."""

    def trainable_models(self) -> dict[str, nn.Module]:
        """Models that receive gradients, by role, in the order of their optimizers."""


@runtime_checkable
class SplitsModels(Protocol):
    """A strategy that can split a model which is not trained."""

    def shard_frozen(self, model: nn.Module, *, whole: bool = False) -> None:
        """Have a model compute as trained ones do, in place, and unless ``whole`` split it."""


@runtime_checkable
class ReadsParts(Protocol):
    """A strategy whose processes read their parts of a model, once it is split."""

    def reading_parts(self) -> AbstractContextManager[None]:
        """Build the models of a module inside without their weights."""


def leave_inference_mode(trainer: L.Trainer) -> None:
    """Evaluate under ``no_grad``: weights gathered in inference mode cannot be trained with."""
    trainer.fit_loop.epoch_loop.val_loop.inference_mode = False
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


def refuse_quantised(model: nn.Module, strategy: str, remedy: str) -> None:
    """Raise `ValueError` for weights that are more than their entries, and cannot be split."""
    if {type(weight).__name__ for weight in model.parameters()} & {"Params4bit", "Int8Params"}:
        raise ValueError(
            f"{strategy} cannot split weights that are quantised (quantization: 4bit or 8bit); "
            f"drop quantization, or {remedy}"
        )


def refuse_compiled(model: nn.Module, strategy: str, remedy: str) -> None:
    """Raise `ValueError` for compiled layers, which would wait for weights that hooks gather."""
    if is_compiled(model):
        raise ValueError(
            f"{strategy} gathers weights inside of layers, which cannot be compiled then; "
            f"set compile: false, or {remedy}"
        )


def trained_models(module: L.LightningModule | None) -> dict[str, nn.Module]:
    """Return a module's trained models by role; `TypeError` if it does not name them."""
    if not isinstance(module, Trains):
        raise TypeError(
            f"{type(module).__name__} has no trainable_models(), which this strategy needs to "
            "know what to split; subclasses of lrlhf.modules.TrainingModule have it"
        )
    return module.trainable_models()


def waits_for_every_parameter(trainer: L.Trainer) -> bool:
    """Tell whether a backward pass that leaves trainable parameters out would stop the run.

    DistributedDataParallel waits for the gradient of each, unless it was told to look for those
    that are unused.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy) or isinstance(strategy, SplitsModels):
        return False
    return not looks_for_unused_parameters(strategy)


def minds_idle_parts(trainer: L.Trainer) -> bool:
    """Tell whether a part of a model that takes part on some ranks only would stop the run.

    DeepSpeed fills buckets with gradients as they come, on every rank its own.
    """
    several = trainer.world_size > 1 and isinstance(trainer.strategy, DeepSpeedStrategy)
    return several or waits_for_every_parameter(trainer)
