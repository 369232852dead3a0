"""A file to which whole lines are added."""

from __future__ import annotations

import os
from pathlib import Path

from lrlhf.run.atomic import atomic_write, naming


class GrowingFile:
    """Adds data behind what it knows to be whole.

    Args:
        path: The file; what is in it does not count until `replace` has written it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end = 0

    def replace(self, data: bytes) -> None:
        """Write the file anew, in one step."""
        with atomic_write(self.path) as handle:
            handle.write(data)
        self._end = len(data)

    def append(self, data: bytes) -> None:
        """Add data; they are the system's when this returns, and outlast this process.

        Raises:
            OSError: They could not be written; what was there before is still there.
        """
        with naming(self.path), self.path.open("r+b") as handle:
            # what did not fit on the disk may have left its beginning behind
            handle.seek(self._end)
            handle.truncate()
            handle.write(data)
        self._end += len(data)

    def sync(self) -> None:
        """Bring the data to the disk, where they outlast the machine."""
        if self.path.exists():
            with self.path.open("rb") as handle:
                os.fsync(handle.fileno())


def whole_lines(path: Path) -> bytes:
    """Read a file up to its last line break: a kill may have cut a line short."""
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1]
