"""A file of responses that grows row by row, and has its name only when it is whole."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from lrlhf.cli.messages.errors import ConfigError
from lrlhf.run.atomic import HELD, atomic_write


class AnswerFile:
    """Written as ``<name>.partial``, beside what it is made with, until it is finished.

    Args:
        path: Must not exist.
        lines_per_row: Lines of one row are written together or not at all.

    Raises:
        ConfigError: It exists, or another process writes it.
    """

    def __init__(self, path: Path, lines_per_row: int) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial")
        self._settings = path.with_name(f"{path.name}.settings.json")
        self._lines_per_row = lines_per_row
        self._handle: IO[bytes] | None = None

    def __enter__(self) -> Self:
        if self._path.exists():
            raise ConfigError(f"output: {self._path} exists; choose another name, or remove it")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = self._partial.open("a+b")
            fcntl.flock(self._handle.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if self._handle is not None:
                self._handle.close()
            if error.errno in HELD:
                raise ConfigError(f"output: another process writes {self._partial}") from error
            raise ConfigError(f"output: {self._path} cannot be written: {error}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._handle is not None
        self._handle.close()
        if self._partial.exists() and self._partial.stat().st_size == 0:
            self._partial.unlink()
            self._settings.unlink(missing_ok=True)

    def begin(self, settings: Mapping[str, Any]) -> int:
        """Go on where an earlier process with the same settings stopped.

        Returns:
            Number of the last row that is written; 0: none is.

        Raises:
            ConfigError: The partial file was made with other settings.
        """
        assert self._handle is not None
        plain = json.loads(json.dumps(settings))
        if self._partial.stat().st_size:
            known = json.loads(self._settings.read_text()) if self._settings.exists() else {}
            changed = sorted(key for key in plain if known.get(key) != plain[key])
            if changed:
                raise ConfigError(
                    f"output: {self._partial} was begun with another {', '.join(changed)}; remove "
                    "it to start over, or choose another name"
                )
            # not before: the lines of a row may be others under other settings
            return self._last_row()
        with atomic_write(self._settings) as handle:
            handle.write(json.dumps(plain).encode())
        return 0

    def write(self, lines: Sequence[str]) -> None:
        """Append the lines of whole rows."""
        assert self._handle is not None
        self._handle.writelines(f"{line}\n".encode() for line in lines)
        self._handle.flush()

    def finish(self) -> None:
        """Give the file its name.

        Raises:
            ConfigError: It has been taken in the meantime.
        """
        assert self._handle is not None
        os.fsync(self._handle.fileno())
        if self._path.exists():
            raise ConfigError(
                f"output: {self._path} exists by now; the responses are in {self._partial}"
            )
        self._partial.rename(self._path)
        self._settings.unlink(missing_ok=True)

    def _last_row(self) -> int:
        """Cut off what a killed process left half written; returns the last whole row."""
        assert self._handle is not None
        self._handle.seek(0)
        end = position = last = 0
        for number, line in enumerate(self._handle, start=1):
            if not line.endswith(b"\n"):
                break
            position += len(line)
            if number % self._lines_per_row == 0:
                end, last = position, int(json.loads(line)["row"])
        self._handle.truncate(end)
        return last
