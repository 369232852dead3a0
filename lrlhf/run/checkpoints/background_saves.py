"""Checkpoints that are written while the run goes on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol, TypeVar, cast, runtime_checkable

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from lrlhf.run.collectives import portable

T = TypeVar("T")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes that write a checkpoint together.

    Args:
        several: They are connected; else there is one.
        group: By which connection; None: that of the run.
    """

    several: bool
    group: ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """Index of this process."""
        return torch.distributed.get_rank() if self.several else 0

    def all(self, function: Callable[[], T]) -> list[T]:
        """Call a function on all ranks; each returns what all got, or raises what one met."""
        value: T | None = None
        failure: Exception | None = None
        try:
            value = function()
        except Exception as error:  # noqa: BLE001  raised once the others, who wait, are told
            failure = error
        outcome = (value, None if failure is None else portable(failure))
        outcomes = [outcome]
        if self.several:
            outcomes *= torch.distributed.get_world_size()
            torch.distributed.all_gather_object(outcomes, outcome, group=self.group)
        failures = [failure, *(met for _, met in outcomes)]
        for met in filter(None, failures):
            raise met
        return [cast(T, value) for value, _ in outcomes]

    def on_zero(self, function: Callable[[], T]) -> T:
        """Call a function on rank zero; every rank returns or raises what came of it."""
        return cast(T, self.all(lambda: function() if self.rank == 0 else None)[0])


class BackgroundSaves:
    """Writes one checkpoint at a time in a thread, by a connection of its own between the ranks.

    All ranks must call all methods but `close` and `is_busy` in the same order.

    Args:
        device: Of this rank; from a GPU copies go to main memory that it writes to directly.
        timeout: How long ranks wait for each other; None: as long as torch lets them.
    """

    def __init__(self, device: torch.device, *, timeout: timedelta | None = None) -> None:
        several = torch.distributed.is_initialized()
        group = None
        if several:
            group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        pinned = device.type != "cpu"
        self._ranks = Ranks(several=several, group=group)
        options = StagingOptions(
            use_pinned_memory=pinned,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=pinned,
        )
        self._stager = DefaultStager(options)
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="checkpoint",
            # each thread begins with the first GPU
            initializer=partial(torch.cuda.set_device, device) if device.type == "cuda" else None,
        )
        self._saving: Future[None] | None = None

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors to main memory, into the place of those of the save before."""
        return cast(dict[str, Tensor], self._stager.stage(dict(tensors)))

    def start(self, write: Callable[[Ranks], None]) -> None:
        """Begin to write; what was begun before must be finished."""
        self._saving = self._thread.submit(write, self._ranks)

    def is_busy(self) -> bool:
        """Tell whether this rank is still writing."""
        return self._saving is not None and not self._saving.done()

    def finish(self) -> None:
        """Wait for what is being written, and raise on all ranks what it met on any."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        Ranks(several=self._ranks.several).all(saving.result)

    def close(self) -> None:
        """Wait for what is being written; where the run ends with an error, so may this."""
        self._thread.shutdown()
        if self._saving is not None and (failure := self._saving.exception()):
            _logger.error("a checkpoint could not be written: %s", failure)
        self._stager.close()


@runtime_checkable
class SavesInBackground(Protocol):
    """A strategy whose checkpoints may reach the disk later than they are saved."""

    def in_background(self) -> contextlib.AbstractContextManager[None]:
        """Let what is saved inside be written later."""

    def is_saving(self) -> bool:
        """Tell, the same on all ranks, whether something is still being written."""

    def finish_saves(self) -> None:
        """Wait until all of it is on the disk; raises on all ranks what came between."""


def in_background(strategy: Strategy) -> contextlib.AbstractContextManager[None]:
    """Let a strategy that can do so write later what is saved inside."""
    if isinstance(strategy, SavesInBackground):
        return strategy.in_background()
    return contextlib.nullcontext()


def is_saving(strategy: Strategy) -> bool:
    """Tell, the same on all ranks, whether a strategy is still writing a checkpoint."""
    return isinstance(strategy, SavesInBackground) and strategy.is_saving()


def finish_saves(strategy: Strategy) -> None:
    """Wait until all that a strategy was told to save is on the disk; all ranks must call it."""
    if isinstance(strategy, SavesInBackground):
        strategy.finish_saves()
