"""The one form that the rows of every source have, whatever their source writes for it."""

from __future__ import annotations

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lrlhf.datamodules.rows.bad_rows import BadRow

_LISTED = re.compile(r"\s*(?:array\(\s*)?\[\s*\{\s*['\"]\w+['\"]\s*:")
"""Begins what JSON, Python or NumPy writes for a list of mappings."""
_SPEAKER = re.compile(r"['\"](?:role|from)['\"]\s*:")
_PLAIN = {type(None), bool, bytes, int, str}
_LONGEST_PYTHON = 2**20
"""Characters of a value in Python's way: its syntax tree takes hundreds of times their space."""
_MISSING = {"NAType", "NaTType"}
"""Types of missing values, by name, as pandas need not be installed."""


@runtime_checkable
class _Array(Protocol):
    """An array, tensor or scalar of NumPy or torch."""

    ndim: int
    dtype: Any

    def tolist(self) -> Any: ...


def plain_row(row: Any) -> Mapping[str, Any] | BadRow:
    """Return a row with its values as `plain` gives them, or a `BadRow` for what is no row."""
    if isinstance(row, BadRow):
        return row
    if not isinstance(row, Mapping):
        return BadRow("wrong type", f"a row is a dict of columns, not {row!r:.60}")
    if odd := [column for column in row if not isinstance(column, str)]:
        return BadRow("wrong type", f"columns are named by text, not by {odd[0]!r}")
    try:
        return {column: plain(value) for column, value in row.items()}
    except RecursionError:
        return BadRow("wrong type", "a column holds lists in lists without end")


def plain(value: Any) -> Any:
    """Return a value as JSON would give it; what JSON has no form for stays as it is.

    Tables give every struct of a column the same keys, and fill what one of them lacks with null.
    What had null from the start cannot be told from that, so a key whose value is null, NaN or
    another sign of a missing value is left out of a mapping, from whichever source. In lists null
    stays, because there it has a place.
    """
    if type(value) in _PLAIN:
        return value
    if type(value) is float:
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        if {"array", "sampling_rate"} <= value.keys():  # the samples of an audio stay an array
            return dict(value)
        entries = ((str(key), plain(entry)) for key, entry in value.items())
        return {key: entry for key, entry in entries if entry is not None}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    # with more dimensions it is an image or a video
    if isinstance(value, _Array) and (value.ndim <= 1 or value.dtype == object):
        kind = getattr(value.dtype, "kind", "")
        if kind in ("M", "m"):  # of nanoseconds Python would make whole numbers
            value = np.asarray(value).astype(f"{kind}8[us]")
        return plain(value.tolist())
    return _plain_scalar(value)


def _plain_scalar(value: Any) -> Any:
    if type(value).__name__ in _MISSING:
        return None
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        is_integral = value.is_finite() and value == value.to_integral_value()
        return int(value) if is_integral else plain(float(value))
    return value


def read_json(text: str) -> Any:
    """Read JSON in which no object has a key twice, of which one value would be lost.

    Raises:
        ValueError: It has, or is no JSON.
        RecursionError: It is nested too deeply.
    """
    return _DECODER.decode(text)


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError(f"the key {first_twice([key for key, _ in pairs])!r} stands twice")
    return entries


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
decode_json_at = _DECODER.raw_decode
"""Reads one JSON value from a place of a text, as `read_json`; returns it and where it ends."""


def first_twice(names: Sequence[str]) -> str | None:
    """Return the first name that stands twice; None: each stands once."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def read_structure(text: str) -> Any:
    """Read a list or mapping that is written as text: as JSON, or as Python writes it.

    Its nulls stay, as the text has them for certain. Text in Python's way has to be exactly what
    Python writes for the value: what NumPy writes for an array looks alike, lacks the commas, and
    would be read as another list.

    Raises:
        ValueError: It is neither.
    """
    try:
        return read_json(text)
    except (ValueError, RecursionError) as error:
        problem = error
    try:
        value = ast.literal_eval(text.strip()) if len(text) <= _LONGEST_PYTHON else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = None
    if value is not None and repr(value) == text.strip():
        return value
    raise ValueError(f"no JSON ({problem})") from problem


def read_turns(value: Any, column: str) -> Any:
    """Return the chat turns that a cell holds as text; any other value as it is.

    Raises:
        BadRow: It looks like such a text and cannot be read.
    """
    if not isinstance(value, str) or not (_LISTED.match(value) and _SPEAKER.search(value)):
        return value
    try:
        turns = plain(read_structure(value))
    except ValueError as error:
        raise BadRow(
            "turns as text",
            f"column {column!r} holds the text of a list of messages, which is {error}: "
            f"{value.strip()[:60]!r}",
            remedy="write lists into a .csv as JSON (json.dumps), or the rows as .jsonl or "
            ".parquet",
        ) from error
    spoken = (isinstance(turn, dict) and bool({"role", "from"} & turn.keys()) for turn in turns)
    return turns if all(spoken) else value
