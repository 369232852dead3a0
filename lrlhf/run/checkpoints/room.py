"""Whether a checkpoint fits on the disk, said before it is begun."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor


def check_room(path: Path, content: Any, what: str = "a checkpoint") -> None:
    """Refuse to write what the disk has no room for.

    Args:
        path: Of the checkpoint, or of the folder that it goes to; need not exist.
        content: Of the checkpoint; its tensors count, whole ones as split ones, each once.
        what: What the content is of.

    Raises:
        OSError: There is less room than the tensors take.
    """
    unique = {id(tensor): tensor for tensor in _tensors(content)}
    needed = sum(tensor.numel() * tensor.element_size() for tensor in unique.values())
    whole = path.absolute()
    free = shutil.disk_usage(next(p for p in (whole, *whole.parents) if p.exists())).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: {what} takes at least {_in_gb(needed)}, and "
            f"{_in_gb(free)} are free: make room, set another dirpath, or save_weights_only: true",
            str(path),
        )


def _tensors(content: Any) -> Iterator[Tensor]:
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from _tensors(value)
    elif isinstance(content, list | tuple):
        for value in content:
            yield from _tensors(value)


def _in_gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e7 else f"{size / 1e6:.3g} MB"
