"""What the C library does with memory that a model on a CPU has just given back."""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_NEVER = -1
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""glibc takes no more (64-bit). Left alone it arrives there by itself after a few passes."""


def keep_host_memory() -> bool:
    """Let this process keep the memory that passes free, where its C library is glibc.

    By default glibc returns the end of its heap to the system as soon as 64 MB of it are free,
    which is after every pass, and the next pass waits for the system to clear each page of it
    again. The largest amount that the process holds stays what it is: it is held for longer.

    Settings of the user (``MALLOC_*``, ``GLIBC_TUNABLES``) win, and another allocator that was
    loaded before (``LD_PRELOAD``) has its own ways and ignores this.

    Returns:
        Whether it was set.
    """
    chosen = any(
        name.startswith("MALLOC_") or (name == "GLIBC_TUNABLES" and "malloc" in value)
        for name, value in os.environ.items()
    )
    if chosen or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    # a threshold that is set ends the growth of the other, so both are
    given = ((_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), (_TRIM_THRESHOLD, _NEVER))
    return all(mallopt(option, value) == 1 for option, value in given)
