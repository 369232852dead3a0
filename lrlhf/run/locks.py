"""Locks of the operating system, which are gone with the process that held them."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

_HELD: Final = (errno.EACCES, errno.EAGAIN)


def claim(descriptor: int) -> bool:
    """Have others see that an open file or folder is being written, until it is closed.

    Returns:
        Whether nobody else has claimed it; also true where the file system has no such locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _HELD  # any other one says that there are no locks here
    return True


def is_claimed(path: Path) -> bool:
    """Tell whether a living process has claimed a file or folder; a link has no owner."""
    if path.is_symlink():
        return False
    try:
        # network file systems lock only what may be written, which a folder cannot be
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    except FileNotFoundError:
        return False
    except PermissionError:  # another user's, and theirs to remove
        return True
    try:
        return not claim(descriptor)
    finally:
        os.close(descriptor)


def own(descriptor: int) -> bool | None:
    """Take an open file for this process, and for none that it forks, until it is closed.

    The lock is gone too when this process closes any other descriptor of the same file.

    Returns:
        Whether no other process has it; None: the file system has no such locks.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _HELD else None
    return True
