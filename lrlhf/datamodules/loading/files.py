"""Reading .jsonl, .json, .parquet and .csv files, each optionally compressed (.gz, .zst).

Whoever wrote a file may be a stranger: rows are read one after the other, and neither what a small
file unpacks to nor a row without an end fills the memory.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO, Final, TextIO

from lrlhf.datamodules.loading.plain_rows import decode_json_at, first_twice, read_json
from lrlhf.datamodules.loading.python_rows import rows_of_arrow
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow

RowsOrBad = Iterator[Mapping[str, Any] | BadRow]

_LONGEST: Final = 2**26
"""Characters of a row: more than a dozen large photos have as base64."""
_UNPACKED: Final = 2**31
_RATIO: Final = 500
"""A file may unpack to ``_UNPACKED`` bytes, or to ``_RATIO`` times its own: text has a tenth of
that, with the same long system prompt in every row a fifth."""
_ROWS: Final = 1_000_000
"""So many rows a file may hold, or as many as it has bytes."""
_BATCH: Final = 64
"""Rows of Parquet that are unpacked at once: a long text in all of them is stored once."""
_CHUNK: Final = 2**16
_BETWEEN: Final = re.compile(r"\s*,?\s*")
_OTHER_SEPARATOR: Final = re.compile(r"[;\t|]")
"""Separates cells in what spreadsheets write in some countries."""


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
            f"{path}: rows are read from {', '.join(sorted(FORMATS))} (each optionally with .gz or "
            f".zst), not from {kind or 'a file without suffix'}"
        )
    with _reading(path, kind), _opened(path) as stream:
        most = max(_ROWS, path.stat().st_size)
        for number, row in enumerate(FORMATS[kind](stream), start=1):
            if number > most:
                raise ValueError(f"it unpacks to more than {most:,} rows")
            yield row


@contextmanager
def _reading(path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except BadDataError as error:
        raise BadDataError(f"{path}: {error}") from error
    except (
        OSError,
        EOFError,
        zlib.error,
        ValueError,
        RecursionError,
        MemoryError,
        csv.Error,
    ) as error:
        raise BadDataError(f"{path}: cannot be read as {kind}: {error}") from error


def _format(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _PACKINGS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


# ---------------------------------------------------------------- bytes and characters


class _Unpacked(io.RawIOBase):
    """What a compressed file holds, as long as it is not far more than data ever is."""

    def __init__(self, stream: Any, packed: int) -> None:
        self._stream = stream
        self.left = max(_UNPACKED, _RATIO * packed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        content = self._stream.read(len(view))
        view[: len(content)] = content
        self.left = _less(self.left, len(content))
        return len(content)


def _less(left: int, taken: int) -> int:
    if taken > left:
        raise ValueError("it unpacks to far more than its own size, as no data does")
    return left - taken


def _zstandard(packed: BinaryIO) -> Any:
    pyarrow = import_module("pyarrow")
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(packed), "zstd")


_PACKINGS: Final[Mapping[str, Callable[[BinaryIO], Any]]] = {
    ".gz": lambda packed: gzip.GzipFile(fileobj=packed),
    ".zst": _zstandard,
}


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file, unpacked."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):  # reading a pipe or a device may never end
        raise ValueError("it is no regular file")
    with path.open("rb") as packed:
        unpack = _PACKINGS.get(path.suffix.lower())
        if unpack is None:
            yield packed
        else:
            yield io.BufferedReader(_Unpacked(unpack(packed), about.st_size))


def _text(stream: io.BufferedReader) -> io.TextIOWrapper:
    """Decode a file, which is UTF-8, or UTF-16 or UTF-32; other bytes become lone surrogates."""
    encoding = json.detect_encoding(stream.peek(4)[:4])
    return io.TextIOWrapper(stream, encoding, errors="surrogateescape", newline="")


def _lines(text: TextIO) -> Iterator[str]:
    while line := text.readline(_LONGEST):
        if len(line) == _LONGEST:
            raise _too_long()
        yield line


def _rest(text: TextIO, before: str = "") -> str:
    rest = before + text.read(_LONGEST)
    if len(rest) >= _LONGEST:
        raise _too_long()
    return rest


def _too_long() -> ValueError:
    return ValueError(f"a row has more than {_LONGEST:,} characters")


def _undecoded(text: str) -> BadRow | None:
    """Describe the first byte that is no character of the file's encoding."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF
        shown = text[max(0, error.start - 30) : error.end + 30].encode(errors="replace").decode()
        return BadRow(
            "not UTF-8",
            f"the byte 0x{byte:02X} in {shown.strip()!r} is no UTF-8",
            remedy="save the file as UTF-8, such as with iconv -f cp1252 -t utf-8",
        )
    return None


# ---------------------------------------------------------------- formats


def _jsonl(stream: io.BufferedReader) -> RowsOrBad:
    with _text(stream) as text:
        yield from _json_rows(text)


def _json(stream: io.BufferedReader) -> RowsOrBad:
    """Read a list of rows, or a row per line.

    Raises:
        BadDataError: It is one value, over several lines.
    """
    with _text(stream) as text:
        first = next((line for line in _lines(text) if line.strip()), "")
        if not first.lstrip().startswith("["):
            try:
                json.loads(first)
            except (ValueError, RecursionError):
                value = read_json(_rest(text, first))
                raise BadDataError(
                    f"it holds one {type(value).__name__}, where a list of rows, or a row per "
                    "line, is wanted"
                ) from None
        yield from _json_rows(text, first)


def _json_rows(text: TextIO, first: str = "") -> RowsOrBad:
    """Read a row per line, or the entries of a list."""
    blank, begun = 0, False
    for line in chain([first] if first else [], _lines(text)):
        if not line.strip():
            blank += 1
            if blank > _ROWS:
                raise ValueError(f"it has more than {_ROWS:,} empty lines")
            continue
        if not begun and line.lstrip().startswith("["):
            yield from _entries(text, line)
            return
        begun = True
        for _ in range(blank):  # only now: blank lines at the end of a file are no rows
            yield BadRow("unparsable JSON", "the line is empty", remedy="delete empty lines")
        blank = 0
        yield _parsed(line)


def _parsed(line: str) -> Mapping[str, Any] | BadRow:
    if (undecoded := _undecoded(line)) is not None:
        return undecoded
    try:
        return _row(read_json(line))
    except (ValueError, RecursionError) as error:
        return BadRow("unparsable JSON", f"{error} in {line.strip()[:60]!r}")


def _row(value: object) -> Mapping[str, Any] | BadRow:
    if isinstance(value, dict):
        return value
    return BadRow("wrong type", f"a row is an object of columns, not {type(value).__name__}")


def _entries(text: TextIO, buffer: str) -> RowsOrBad:
    """Go through the entries of a JSON list, of which no more is held than the next one."""
    position, more = buffer.index("[") + 1, True
    for number in count(1):
        while True:
            position = _BETWEEN.match(buffer, position).end()  # type: ignore[union-attr]
            if buffer[position : position + 1] == "]":
                if (buffer[position + 1 :] + text.read(_CHUNK)).strip():
                    raise ValueError("there is more behind the list")
                return
            try:
                value, end = decode_json_at(buffer, position)
                # at its end a number could go on
                known = end < len(buffer) or not more
                problem: Exception = EOFError("the list has no end")
            except ValueError as error:
                known, problem = False, error
            if known:
                break
            if not more:
                raise ValueError(f"row {number}: {problem}") from problem
            buffer, position = buffer[position:], 0
            if len(buffer) > _LONGEST:
                raise ValueError(f"row {number}: {problem}, or {_too_long()}") from problem
            added = text.read(max(_CHUNK, len(buffer)))
            buffer, more = buffer + added, bool(added)
        yield _undecoded(buffer[position:end]) or _row(value)
        position = end


def _parquet(stream: io.BufferedReader) -> RowsOrBad:
    pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    unpacked = isinstance(stream.raw, _Unpacked)
    # a compressed stream cannot be read from its end, where parquet keeps its index
    file: BinaryIO = io.BytesIO(stream.read()) if unpacked else stream
    size = file.seek(0, io.SEEK_END)
    left = max(_UNPACKED, _RATIO * size)
    try:
        table = parquet.ParquetFile(file)
        for group in map(table.metadata.row_group, range(table.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                # one row may have them all, and is unpacked at once
                _less(max(_LONGEST, _RATIO * size), column.num_values)
        if (twice := first_twice(table.schema_arrow.names)) is not None:
            raise ValueError(_twice(twice))
        for batch in table.iter_batches(_BATCH):
            left = _less(left, batch.nbytes)
            yield from rows_of_arrow(batch)
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from error


def _csv(stream: io.BufferedReader) -> RowsOrBad:
    csv.field_size_limit(max(_LONGEST, csv.field_size_limit()))  # 131,072 by default
    with _text(stream) as text:
        yield from _rows_of_cells(csv.reader(_lines(text), strict=True))


def _rows_of_cells(lines: Iterator[list[str]]) -> RowsOrBad:
    header = next(lines, [])
    if (undecoded := _undecoded("".join(header))) is not None:
        raise ValueError(f"{undecoded.detail}; {undecoded.remedy}")
    if (twice := first_twice(header)) is not None:
        raise ValueError(_twice(twice))
    if len(header) == 1 and (other := _OTHER_SEPARATOR.search(header[0])):
        raise ValueError(f"its cells are separated by {other[0]!r}: write it with commas")
    for cells in filter(None, lines):
        if len(cells) != len(header):
            yield BadRow("wrong type", "the line has not as many cells as the header has columns")
        else:
            yield _undecoded("".join(cells)) or dict(zip(header, cells, strict=True))


def _twice(name: str) -> str:
    return f"it has two columns {name!r}, of which one would be lost: rename them"


FORMATS: Mapping[str, Callable[[io.BufferedReader], RowsOrBad]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": _csv,
}
