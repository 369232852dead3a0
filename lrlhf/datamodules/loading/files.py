"""Reading .jsonl, .json, .parquet and .csv files, each optionally compressed with gzip."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow

RowsOrBad = Iterator[Mapping[str, Any] | BadRow]


def is_data_file(path: Path) -> bool:
    """Whether the name ends like a file that can be read here."""
    return _format(path) in FORMATS


def read_rows_of_file(path: Path) -> RowsOrBad:
    """Go through the rows of one file; row numbers start at 1 and are the lines of a .jsonl.

    Raises:
        BadDataError: The file as a whole cannot be read.
    """
    kind = _format(path)
    if kind not in FORMATS:
        raise BadDataError(
            f"{path}: rows are read from {', '.join(sorted(FORMATS))} (each optionally with .gz), "
            f"not from {kind or 'a file without suffix'}"
        )
    try:
        with _open(path) as stream:
            yield from FORMATS[kind](stream)
    except (
        OSError,
        EOFError,
        zlib.error,
        ValueError,
        RecursionError,
        csv.Error,
    ) as error:
        raise BadDataError(f"{path}: cannot be read as {kind}: {error}") from error


def _format(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _open(path: Path) -> BinaryIO:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")


def _jsonl(stream: BinaryIO) -> RowsOrBad:
    blank = 0
    for line in stream:
        if not line.strip():
            blank += 1
            continue
        for _ in range(blank):  # only now: blank lines at the end of a file are no rows
            yield BadRow("unparsable JSON", "the line is empty", remedy="delete empty lines")
        blank = 0
        yield _parse_line(line)


def _parse_line(line: bytes) -> Mapping[str, Any] | BadRow:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # also bytes that are no UTF-8
        shown = line.decode("utf-8", errors="replace").strip()[:60]
        return BadRow("unparsable JSON", f"{error} in {shown!r}")
    return _row(value)


def _row(value: object) -> Mapping[str, Any] | BadRow:
    if isinstance(value, dict):
        return value
    return BadRow("wrong type", f"a row is an object of columns, not {type(value).__name__}")


def _json(stream: BinaryIO) -> RowsOrBad:
    values = json.load(stream)
    if not isinstance(values, list):
        raise BadDataError(
            f"it holds one {type(values).__name__}, where a list of rows is wanted; one row per "
            "line goes into a .jsonl file"
        )
    yield from map(_row, values)


def _parquet(stream: BinaryIO) -> RowsOrBad:
    # a compressed stream cannot be read from its end, where parquet keeps its index
    compressed = isinstance(stream, gzip.GzipFile)
    pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    try:
        table = parquet.ParquetFile(io.BytesIO(stream.read()) if compressed else stream)
        for batch in table.iter_batches():
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from error


def _csv(stream: BinaryIO) -> RowsOrBad:
    text = io.StringIO(stream.read().decode("utf-8-sig"), newline="")
    for row in csv.DictReader(text, strict=True):
        if None in row or None in row.values():
            yield BadRow("wrong type", "the line has not as many cells as the header has columns")
        else:
            yield row


FORMATS: Mapping[str, Callable[[BinaryIO], RowsOrBad]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": _csv,
}
