"""From sources to parsed rows, and the checks that every kind of row needs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from lrlhf.datamodules.loading.sources import Component, Row
from lrlhf.datamodules.rows.bad_rows import BadRow, BadRows, missing_column

T = TypeVar("T")
U = TypeVar("U")


class Placed(NamedTuple, Generic[T]):
    """Something made of one row, and where the row stands."""

    component: int
    """Index of the entry of the mixture."""
    place: str
    """Source and row number, such as ``train.jsonl:17``."""
    value: T


def read_rows(
    components: Sequence[Component],
    parse: Callable[[Row, Path | None], T],
    bad_rows: BadRows,
) -> list[Placed[T]]:
    """Parse every row of every source; those that ``parse`` refuses are counted.

    Args:
        components: The entries of ``train`` or ``val``. Where there are several, rows without a
            column ``source`` get one, so that results can be told apart.
        parse: Gets a row and the folder that its relative paths start from; raises `BadRow` on one
            that cannot be used.
        bad_rows: Gets the refused rows and the total.
    """
    parsed: list[Placed[T]] = []
    for index, component in enumerate(components):
        added = {"source": component.name} if len(components) > 1 else {}
        for source in component.sources:
            for number, row in enumerate(source.rows(), start=1):
                place = f"{source.name}:{number}"
                bad_rows.total += 1
                try:
                    if isinstance(row, BadRow):
                        raise row
                    value = parse({**added, **row, **component.columns}, source.folder)
                except BadRow as problem:
                    bad_rows.add(place, problem)
                else:
                    parsed.append(Placed(index, place, value))
    return parsed


def keep_good(
    rows: Sequence[Placed[T]], results: Sequence[U | BadRow], bad_rows: BadRows
) -> list[Placed[U]]:
    """Replace each row's value by its result, and count the results that are bad rows."""
    kept: list[Placed[U]] = []
    for row, result in zip(rows, results, strict=True):
        if isinstance(result, BadRow):
            bad_rows.add(row.place, result)
        else:
            kept.append(Placed(row.component, row.place, result))
    return kept


def text_of(row: Row, column: str, *, setting: str = "", allow_empty: bool = False) -> str:
    """Return a column that must be text with something in it."""
    if column not in row:
        raise missing_column(column, row, setting=setting)
    value = row[column]
    if not isinstance(value, str):
        raise wrong_type(column, "text", value)
    if not value.strip() and not allow_empty:
        raise BadRow("empty text", f"column {column!r} is empty")
    return whole_text(value, f"column {column!r}")


def whole_text(text: str, what: str) -> str:
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


def structure_of(row: Row, column: str, wanted: type[U]) -> U | None:
    """Return a column that is a list or a mapping, also one written as JSON; None if absent."""
    value = row.get(column)
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRow("wrong type", f"column {column!r} is no JSON: {error}") from error
    if not isinstance(value, wanted):
        raise wrong_type(column, f"a {wanted.__name__}", value)
    return value


def wrong_type(column: str, wanted: str, value: object) -> BadRow:
    """Describe a column that holds another kind of value than is wanted."""
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return BadRow(
        "wrong type", f"column {column!r} should be {wanted}, not {type(value).__name__} {shown}"
    )


def plain(value: Any) -> Any:
    """Return ``value`` made of JSON types only; what is none of them becomes its text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return str(value)
