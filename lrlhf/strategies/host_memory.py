"""What the C library does with memory that a model on a CPU has just given back."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
_NEVER = -1


def keep_host_memory() -> bool:
    """Let this process keep the memory that passes free, where its C library is glibc.

    By default glibc returns the end of its heap to the system as soon as 64 MB of it are free, and
    at once every block of 32 MB or more. Both is so after each pass, and the next one waits for the
    system to clear each page of it again. The largest amount that the process holds stays about
    what it is (where blocks of many sizes take turns, 12 % more were seen), and is held for longer:
    until :func:`return_host_memory`.

    Settings of the user (``MALLOC_*``, ``GLIBC_TUNABLES``) win, and another allocator that was
    loaded before (``LD_PRELOAD``) has its own ways and ignores this.

    Returns:
        Whether it was set.
    """
    chosen = any(
        name.startswith("MALLOC_") or (name == "GLIBC_TUNABLES" and "malloc" in value)
        for name, value in os.environ.items()
    )
    mallopt = _of_glibc("mallopt")
    if chosen or mallopt is None:
        return False
    # no block is the system's own any more: all come from the heap, whose end is not given back
    given = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER))
    return all(mallopt(option, value) == 1 for option, value in given)


def return_host_memory() -> bool:
    """Give what is free back to the system, as after a fit in a notebook that goes on.

    Returns:
        Whether the C library can.
    """
    trim = _of_glibc("malloc_trim")
    if trim is None:
        return False
    trim(ctypes.c_size_t(0))
    return True


def _of_glibc(name: str) -> Any | None:
    """Return a function that glibc has and others, such as musl and macOS's, have not."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
