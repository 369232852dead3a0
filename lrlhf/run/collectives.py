"""What an iteration needs to know from the other ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lrlhf.functional.masking import masked_sum

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
    told = None if failure is None else portable(failure)
    value, told = strategy.broadcast((value, told))
    failure = failure or told
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
        kept = torch.where(mask, values - origin, 0.0)
        total = self.sum(torch.stack([masked_sum(kept, mask), mask.sum().to(values.dtype)]))
        count = total[1]
        if count < 2:
            return values
        centered = kept - total[0] / count
        variance = self.sum(masked_sum(centered.square(), mask)) / (count - 1)
        return torch.where(mask, centered / (variance.sqrt() + eps), values)
