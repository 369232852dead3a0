"""What the C library does with memory that a model on a CPU has just given back."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # M_TRIM_THRESHOLD… of malloc.h
_NEVER = -1
_KEEP = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER))
"""All blocks come from the heap, and its end stays with the process."""
_RETURN = ((_MMAP_MAX, 2**16), (_MMAP_THRESHOLD, 2**25), (_TRIM_THRESHOLD, 2**26))
"""What glibc comes to by itself after a few large blocks (64-bit)."""

_kept = False


def keep_host_memory() -> bool:
    """Let this process keep the memory that a micro-batch frees, where its C library is glibc.

    By default glibc returns the end of its heap to the system as soon as 64 MB of it are free, and
    at once every block of 32 MB or more, and the next micro-batch waits for the system to clear
    each page again. Settings of the user (``MALLOC_*``, ``GLIBC_TUNABLES``) win. Returns whether it
    was set.
    """
    global _kept
    chosen = any(
        name.startswith("MALLOC_") or (name == "GLIBC_TUNABLES" and "malloc" in value)
        for name, value in os.environ.items()
    )
    if chosen:
        return False
    _kept = _set(_KEEP)
    return _kept


def return_host_memory() -> None:
    """Give what is free back to the system after a fit, for a notebook that goes on."""
    global _kept
    if _kept:
        _set(_RETURN)
        _of_glibc("malloc_trim")(ctypes.c_size_t(0))
        _kept = False


def _set(options: tuple[tuple[int, int], ...]) -> bool:
    mallopt = _of_glibc("mallopt")
    return mallopt is not None and all(mallopt(*option) == 1 for option in options)


def _of_glibc(name: str) -> Any:
    """Return a function that glibc has and others, such as musl and macOS's, have not, or None."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
