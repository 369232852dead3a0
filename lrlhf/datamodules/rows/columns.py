"""Reading one column of a row: text, a number, a list or a mapping, or a `BadRow` that names it."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from lrlhf.datamodules.loading.plain_rows import plain, read_structure, read_turns
from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.rows.bad_rows import BadRow, missing_column

T = TypeVar("T")


def is_empty(value: object) -> bool:
    """Whether a table's cell holds nothing: None, empty text or NaN."""
    if isinstance(value, str | float):  # an array has no truth of its own
        return value == "" or value != value
    return value is None


def text_of(row: Row, column: str, *, setting: str = "", allow_empty: bool = False) -> str:
    """Return a column that must be text with something in it."""
    if column not in row:
        raise missing_column(column, row, setting=setting)
    value = row[column]
    if not isinstance(value, str):
        raise wrong_type(column, "text", value)
    if not value.strip() and not allow_empty:
        raise BadRow("empty text", f"column {column!r} is empty")
    return valid_text(value, f"column {column!r}")


def valid_text(text: str, what: str) -> str:
    """Return ``text``, which a tokenizer can read, or raise `BadRow`.

    JSON can write one half of a surrogate pair, and no encoding has a form for it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            "broken text",
            f"{what} has half a surrogate pair, U+{ord(text[error.start]):04X}, as character "
            f"{error.start + 1}",
            remedy="repair what wrote the text: it cut a character in two",
        ) from error
    return text


def number_of(row: Row, column: str) -> float | None:
    """Return a column that is a finite number, also one written as text; None if absent."""
    value = row.get(column)
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise wrong_type(column, "a number", value) from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(column, "a number", value)
    if not math.isfinite(value):
        raise BadRow("wrong type", f"column {column!r} is {value}, not a finite number")
    return float(value)


def structure_of(row: Row, column: str, kind: type[T]) -> T | None:
    """Return a column that is a list or a mapping, also one written as text; None if absent."""
    value = row.get(column)
    if isinstance(value, str) and value.strip():
        try:
            value = plain(read_structure(value))
        except ValueError as error:
            raise BadRow("wrong type", f"column {column!r} is {error}") from error
    if value is None or value == "":
        return None
    if not isinstance(value, kind):
        raise wrong_type(column, f"a {kind.__name__}", value)
    return value


def with_turns(row: Row, *columns: str) -> dict[str, Any]:
    """Return a row whose ``columns`` hold as lists the chat turns that they hold as text.

    Raises:
        BadRow: One looks like such a text and cannot be read.
    """
    return {**row, **{name: read_turns(row[name], name) for name in columns if name in row}}


def wrong_type(column: str, expected: str, value: object) -> BadRow:
    """Describe a column that holds another kind of value than is wanted."""
    kind = type(value).__name__
    return BadRow(
        "wrong type", f"column {column!r} should be {expected}, not {kind} {shown(value)}"
    )


def shown(value: object) -> str:
    """Return the beginning of a value, as a message can show it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
