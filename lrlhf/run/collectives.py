"""What an iteration needs to know from the other ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from torch import Tensor, nn

from lrlhf.functional.masking import masked_sum
from lrlhf.models import is_compiled
from lrlhf.run.lightning_internals import looks_for_unused_parameters

T = TypeVar("T")


def from_rank_zero(strategy: Strategy, function: Callable[[], T]) -> T:
    """Call a function on rank zero; every rank, all of which call, returns or raises what came."""
    value: T | None = None
    failure: Exception | None = None
    if strategy.is_global_zero:
        try:
            value = function()
        except Exception as error:  # noqa: BLE001  raised once the others, who wait, are told
            failure = error
    outcome = None if failure is None else portable(failure)
    value, outcome = strategy.broadcast((value, outcome))
    failure = failure or outcome
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]  # what the function returned


def portable(error: Exception) -> Exception:
    """Return an error, or what it says where other processes could not read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  whatever its own code raises
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@dataclass(frozen=True, slots=True)
class Collectives:
    """Reductions over all ranks; the identity where there is one process."""

    trainer: L.Trainer

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""
        return self.trainer.world_size

    @property
    def rank(self) -> int:
        """Index of this process."""
        return self.trainer.global_rank

    def sum(self, value: Tensor) -> Tensor:
        """Add ``value`` up over the ranks."""
        return self._reduce(value, "sum")

    def max(self, value: Tensor) -> Tensor:
        """Take the largest ``value`` of the ranks, elementwise."""
        return self._reduce(value, "max")

    def least(self, number: float) -> float:
        """Take the smallest number of the ranks."""
        device = self.trainer.strategy.root_device
        return -float(self.max(torch.tensor(-number, device=device)))

    def any(self, condition: bool) -> bool:
        """Tell whether a condition holds on any rank."""
        device = self.trainer.strategy.root_device
        return bool(self.max(torch.tensor(float(condition), device=device)))

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, on every rank; whatever `pickle` can carry."""
        values: list[Any] = [value]
        if self.world_size > 1:
            values = [None] * self.world_size
            torch.distributed.all_gather_object(values, value)
        return values

    def union(self, names: Iterable[str]) -> list[str]:
        """Collect the names that any rank knows, in the same order everywhere."""
        return sorted(set().union(*self.gather(set(names))))

    def _reduce(self, value: Tensor, operation: str) -> Tensor:
        if self.world_size == 1:
            return value
        # reduce works in place on some back ends, and the caller keeps using its own tensor
        reduced = self.trainer.strategy.reduce(value.clone(), reduce_op=operation)
        if not isinstance(reduced, Tensor):
            raise TypeError(f"the strategy reduced a tensor to {type(reduced).__name__}")
        return reduced

    def whiten(self, values: Tensor, mask: Tensor, *, eps: float) -> Tensor:
        """Shift and scale the masked entries of all ranks to mean 0 and deviation 1, of any shape.

        ``eps`` is added to the deviation (Bessel-corrected). Values stay as they are outside of
        ``mask``, which has their shape, and where fewer than two entries count.
        """
        # measured from one of the entries, equal ones have a mean of exactly 0; the rounding error
        # of a plain mean would be divided by a deviation as small as itself
        lowest = torch.finfo(values.dtype).min
        origin = self.max(torch.where(mask, values, lowest).amax())
        masked = torch.where(mask, values - origin, 0.0)
        total = self.sum(torch.stack([masked_sum(masked, mask), mask.sum().to(values.dtype)]))
        count = total[1]
        if count < 2:
            return values
        centered = masked - total[0] / count
        variance = self.sum(masked_sum(centered.square(), mask)) / (count - 1)
        return torch.where(mask, centered / (variance.sqrt() + eps), values)


@runtime_checkable
class Trains(Protocol):
    """A module that names the models it trains."""

    def trainable_models(self) -> dict[str, nn.Module]:
        """Models that receive gradients, by role, in the order of their optimizers."""


@runtime_checkable
class SplitsModels(Protocol):
    """A strategy that can split a model which is not trained."""

    def shard_frozen(self, model: nn.Module, *, full: bool = False) -> None:
        """Have a model compute as trained ones do, in place, and unless ``full`` split it."""


@runtime_checkable
class LoadsShards(Protocol):
    """A strategy whose processes read their parts of a model, once it is split."""

    def loading_shards(self) -> AbstractContextManager[None]:
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
