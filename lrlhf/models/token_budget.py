"""How many tokens may go through a model at the same time, found out from what they take."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

PEAK_MEMORY = "perf/memory_gib"
"""What it is logged as, of the rank that took the most."""
GIB = 2**30

_BEFORE: dict[torch.device, int] = {}
"""By GPU, what its peak was when the allocator last began to measure anew."""


def peak_memory(device: torch.device) -> int:
    """Return bytes: of a GPU those of the tensors on it, else all that the process has in memory.

    What was measured anew in between, as by `begin_anew`, counts too.
    """
    if device.type == "cuda":
        return max(_BEFORE.get(device, 0), torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def begin_anew(gpu: torch.device) -> None:
    """Have the allocator measure its peak from here on, and remember the one before."""
    _BEFORE[gpu] = peak_memory(gpu)
    torch.cuda.reset_peak_memory_stats(gpu)


FIRST_TOKENS = 2048
"""Tokens of the first micro-batches, of which nothing is known yet; a single row may have more."""

_SHARE = 0.9
"""Of the free memory: the rest is for what lies idle between tensors."""

_GROWTH = 8
"""At most in one go: attention takes memory that need not grow in proportion."""

_STEADY = 1.05


class DeviceMemory(Protocol):
    """What a device tells of its memory, in bytes."""

    def size(self) -> int:
        """All of it."""

    def room(self) -> int:
        """What tensors of this process could still take."""

    def allocated(self) -> int:
        """What its tensors take."""

    def peak(self) -> int:
        """The most that they took since `reset_peak`."""

    def reset_peak(self) -> None:
        """Begin to measure anew."""


class CudaMemory:
    """Memory of a GPU, as PyTorch's allocator sees it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def size(self) -> int:
        return torch.cuda.get_device_properties(self._device).total_memory

    def room(self) -> int:
        free: int = torch.cuda.mem_get_info(self._device)[0]
        # blocks that the allocator keeps for later tensors
        reserved = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        return free + reserved

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        begin_anew(self._device)


def memory_of(device: torch.device) -> DeviceMemory | None:
    """Return what tells of a device's memory; None: nothing does, as on a CPU, or need to."""
    return CudaMemory(device) if device.type == "cuda" else None


@dataclass
class Computed:
    """What is measured.

    Attributes:
        tokens: How many tokens went through together, padding included.
    """

    tokens: int


class TokenBudget:
    """Finds out how many tokens fit, from the memory that some took.

    It starts small. What ``n`` tokens take is ``a + b·n`` bytes or a little more; of a room of
    ``R`` bytes the next attempt uses ``n·R / (a + b·n)`` tokens, which never passes what fits, and
    comes closer to it each time. Once it would grow by less than a twentieth, it stays. A run that
    is resumed on as much memory goes on with what was found. Where algorithms are to be
    deterministic it stays as small as it starts: what is free differs from run to run.

    Args:
        memory: Tells of a device's memory.
    """

    def __init__(self, memory: Callable[[torch.device], DeviceMemory | None] = memory_of) -> None:
        self._memory = memory
        self._tokens = FIRST_TOKENS
        self._proposals: list[float] = []
        self._size: int | None = None
        """Bytes of the device that it was found on."""
        self._warm = False

    def limit(self, chosen: int | str | None, device: torch.device) -> int | None:
        """Return how many tokens may go together.

        Args:
            chosen: A number; None: any; "auto": what was found out, where the device tells of its
                memory, else any.
            device: Where they go.
        """
        if chosen != "auto":
            return chosen  # type: ignore[return-value]  # "auto" is the only word
        memory = self._memory(device)
        if memory is None:
            return None
        if self._size not in (None, memory.size()):
            self._tokens = FIRST_TOKENS  # found on another device
        self._size = memory.size()
        return self._tokens

    @contextlib.contextmanager
    def measuring(self, tokens: int, device: torch.device) -> Iterator[Computed]:
        """See what so many tokens take inside, or as many as are known to have come by the end.

        The first time is not counted: optimizers make their states only after it.
        """
        computed, memory = Computed(tokens), self._memory(device)
        if memory is None or torch.are_deterministic_algorithms_enabled():
            yield computed
            return
        room, before = memory.room(), memory.allocated()
        memory.reset_peak()
        yield computed
        used = memory.peak() - before
        if self._warm and used > 0:
            fits = computed.tokens * _SHARE * room / used
            # of a few tokens the part that does not depend on them says too much: no reason to
            # shrink
            if fits > self._tokens or 2 * computed.tokens >= self._tokens:
                self._proposals.append(fits)
        self._warm = True

    def update(self, least: Callable[[float], float] = lambda own: own) -> None:
        """Move to the smallest number that was measured since the last time.

        Args:
            least: Takes the smallest of all ranks' numbers; all ranks must call.
        """
        if not self._warm:
            return  # nowhere is anything measured
        nothing = float("inf")
        smallest = least(min(self._proposals, default=nothing))
        self._proposals.clear()
        if smallest == nothing:
            return
        fits = max(1, int(min(smallest, _GROWTH * self._tokens)))
        if not self._tokens <= fits <= _STEADY * self._tokens:
            self._tokens = fits

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {"tokens": self._tokens, "device_bytes": self._size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tokens, self._size = state["tokens"], state["device_bytes"]
