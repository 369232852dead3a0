"""A CSV file that grows by rows and by columns, and can be cut back."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lrlhf.run.atomic import atomic_write, naming

_FIRST = ("step", "epoch")
Row = dict[str, str]


class CSVTable:
    """Rows of values by column, each in the file when `append` returns.

    A column that is new is put in its place by rewriting the file in one step: ``step`` and
    ``epoch`` first, the others by name, so that the file does not tell when it was interrupted.

    Args:
        path: The file; what is in it is read by `cut_back` only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = 0
        self._columns: list[str] = []
        self._end = 0

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row.

        Raises:
            OSError: It could not be written; what was in the file is still there.
        """
        cells = {name: _cell(value) for name, value in row.items()}
        columns = _in_order({*self._columns, *cells})
        if columns != self._columns:
            self._rewrite(columns, [*_read(self.path)[: self.rows], cells])
        else:
            data = _lines([[cells.get(name, "") for name in columns]])
            with naming(self.path), self.path.open("r+b") as handle:
                # what did not fit on the disk may have left its beginning behind
                handle.seek(self._end)
                handle.truncate()
                handle.write(data)
            self._end += len(data)
        self.rows += 1

    def cut_back(self, rows: int | None = None) -> int:
        """Keep the first rows and the columns they fill; return how many rows there were.

        Args:
            rows: How many stay, if there are that many; None: all that are whole.

        Raises:
            ValueError: The file is no table.
        """
        found = _read(self.path)
        kept = found[:rows]
        self.rows = len(kept)
        if self.path.exists():
            names = {name for row in kept for name, cell in row.items() if cell}
            self._rewrite(_in_order(names), kept)
        return len(found)

    def sync(self) -> None:
        """Bring the rows to the disk, where they outlast the machine too."""
        if self.path.exists():
            with self.path.open("rb") as handle:
                os.fsync(handle.fileno())

    def _rewrite(self, columns: list[str], rows: Iterable[Row]) -> None:
        cells = [[row.get(name, "") for name in columns] for row in rows]
        data = _lines([columns, *cells]) if columns else b""
        with atomic_write(self.path) as handle:
            handle.write(data)
        self._columns, self._end = columns, len(data)


def _in_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (name not in _FIRST, name == "epoch", name))


def _read(path: Path) -> list[Row]:
    """Read the whole rows: a kill may have cut the last one short."""
    data = path.read_bytes() if path.exists() else b""
    try:
        text = data[: data.rfind(b"\n") + 1].decode()
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        rows = []
        for row in reader:
            if None in row or None in row.values():
                raise csv.Error(f"line {reader.line_num} has more or fewer cells than the header")
            rows.append(row)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"{path} is no table of metrics ({error}); mend it or move it away, or choose another "
            "folder for the logger"
        ) from error
    return rows


def _lines(rows: Iterable[list[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _cell(value: Any) -> str:
    """Text of a value, a number with all its digits."""
    if value is None:
        return ""
    if isinstance(value, Tensor):
        value = value.item()
    # a line of the file is a row
    return " ".join(value.splitlines()) if isinstance(value, str) else repr(value)
