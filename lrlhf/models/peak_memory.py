"""The most memory that this process has taken since it began."""

from __future__ import annotations

import resource
import sys

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
