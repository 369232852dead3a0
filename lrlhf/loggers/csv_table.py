"""A CSV file that grows by rows and by columns, and can go back."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lrlhf.loggers.growing_file import GrowingFile, whole_lines

_FIRST = ("step", "epoch")


class _Contents(NamedTuple):
    columns: list[str]
    rows: list[list[str]]


class CSVTable:
    """Rows of values by column, each in the file when `append` returns.

    A column that is new is put in its place by rewriting the file in one step: ``step`` and
    ``epoch`` first, the others by name, so that the file does not tell when it was interrupted.

    Args:
        path: The file; what is in it is read by `go_back` only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []
        self.rows = 0
        self._file = GrowingFile(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row.

        Raises:
            OSError: It could not be written; what was in the file is still there.
        """
        columns = self._in_order({*self.columns, *row})
        cells = [_cell(row.get(name)) for name in columns]
        if columns != self.columns:
            contents = _Contents(self.columns, _read(self.path).rows[: self.rows])
            self._write(columns, [*_arranged(contents, columns), cells])
        else:
            self._file.append(_lines([cells]))
        self.rows += 1

    def go_back(self, rows: int, columns: Sequence[str]) -> int:
        """Forget all but the first rows and some columns; return how many rows there were.

        Args:
            rows: How many rows stay, if there are that many.
            columns: The columns that stay.

        Raises:
            ValueError: The file is no table.
        """
        contents = _read(self.path)
        kept = contents.rows[:rows]
        self.columns, self.rows = self._in_order({*columns}), len(kept)
        if self.columns or self.path.exists():
            self._write(self.columns, _arranged(_Contents(contents.columns, kept), self.columns))
        return len(contents.rows)

    def take_up(self) -> None:
        """Go on after the last whole row of what is there."""
        contents = _read(self.path)
        self.go_back(len(contents.rows), contents.columns)

    def sync(self) -> None:
        """Bring the rows to the disk, where they outlast the machine too."""
        self._file.sync()

    @staticmethod
    def _in_order(names: Iterable[str]) -> list[str]:
        names = set(names)
        first = [name for name in _FIRST if name in names]
        return first + sorted(names.difference(first))

    def _write(self, columns: list[str], rows: Iterable[list[str]]) -> None:
        self._file.replace(_lines([columns, *rows]) if columns else b"")
        self.columns = columns


def _arranged(contents: _Contents, columns: Sequence[str]) -> list[list[str]]:
    """Cells of every row, in another order of columns; those of a new column are empty."""
    rows = (dict(zip(contents.columns, row, strict=True)) for row in contents.rows)
    return [[row.get(name, "") for name in columns] for row in rows]


def _read(path: Path) -> _Contents:
    """Read the whole rows: a kill may have cut the last one short."""
    try:
        text = whole_lines(path).decode()
        table = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"{path} is no table of metrics ({error}); move it away, or choose another folder for "
            "the logger"
        ) from error
    if not table:
        return _Contents([], [])
    columns, *rows = table
    for number, row in enumerate(rows, start=2):
        if len(row) != len(columns):
            raise ValueError(
                f"{path}, row {number} has {len(row)} cells where the header has {len(columns)}; "
                "mend it or move the file away"
            )
    return _Contents(columns, rows)


def _lines(rows: Iterable[Sequence[str]]) -> bytes:
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
