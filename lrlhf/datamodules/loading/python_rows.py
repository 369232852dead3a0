"""Rows that Python objects hold or make: lists, tables, data sets, generators."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lrlhf.datamodules.loading.plain_rows import first_twice
from lrlhf.datamodules.rows.bad_rows import BadDataError
from lrlhf.media.path_safety import FOREIGN

ACCEPTED = (
    "a path, a hub id, a list of dicts, a dict of columns, a DataFrame, an Arrow table, a "
    "datasets.Dataset, another object with __len__ and __getitem__, or a Source"
)


_EMBEDDED = 16
"""Rows whose files are read at once."""


@runtime_checkable
class Rows(Protocol):
    """Holds rows: a list of dicts, a dict of columns, a table, or a data set with a length."""

    def __len__(self) -> int:
        """Return how many rows there are (of a dict of columns: how many columns)."""
        ...

    def __getitem__(self, key: Any, /) -> Any:
        """Return the row at an index, or the column of a name."""
        ...


RowMaker = Callable[[], Iterable[Any]]
"""Makes the same rows in every call, such as a generator function."""


@runtime_checkable
class _Frame(Protocol):
    """A pandas DataFrame, or what has its methods."""

    columns: Any

    def notna(self) -> Any: ...
    def astype(self, dtype: Any) -> Any: ...
    def to_dict(self, orient: Any) -> Any: ...


@runtime_checkable
class _ArrowTable(Protocol):
    """What can be handed over as an Arrow table, such as one of polars or pyarrow."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


@runtime_checkable
class _HubRows(Protocol):
    """A ``datasets.Dataset``."""

    features: Any
    format: Any
    info: Any

    def with_format(self, type: str, *, columns: Any) -> Any: ...
    def iter(self, batch_size: int) -> Any: ...


def check_rows(data: object, what: str, *, length: int | None = None) -> None:
    """Refuse what holds no rows, in one line.

    Args:
        data: What a user gave, neither text nor a `Source`.
        what: What messages call it, such as ``train``.
        length: Number of rows that the user gave beside it.

    Raises:
        BadDataError: It cannot be read.
    """
    kind = type(data).__name__
    if isinstance(data, type):
        raise BadDataError(f"{what}: the class {data.__name__} is no data: give an instance of it")
    if isinstance(data, Mapping) and any(is_table(part) for part in data.values()):
        splits = ", ".join(map(str, data))
        raise BadDataError(
            f"{what}: {_article(kind)} {kind} holds several data sets ({splits}): give one of "
            f"them, such as data[{next(iter(data))!r}]"
        )
    if isinstance(data, Mapping):
        _check_columns(data, what)
    if hasattr(data, "collate_fn") and hasattr(data, "dataset"):
        raise BadDataError(f"{what}: a {kind} gives batches, not rows: give its data set instead")
    if isinstance(data, _ArrowTable) and not is_table(data):
        raise BadDataError(
            f"{what}: a {kind} holds one column: give it by its name, such as {{'prompt': data}}"
        )
    sized = _is_sized(data) or isinstance(data, _ArrowTable)
    if isinstance(data, str | bytes | bytearray) or not (
        sized or isinstance(data, Iterable) or callable(data)
    ):
        raise BadDataError(
            f"{what}: cannot read rows from {_article(kind)} {kind}: give {ACCEPTED}"
        )
    if not sized and length is None:
        raise BadDataError(
            f"{what}: {_article(kind)} {kind} does not say how many rows it has: give a list, or "
            "MemorySource(data, length=…) to take so many rows of it"
        )


def read_rows(data: Any, length: int | None = None, *, name: str = "data") -> Iterator[Any]:
    """Go through the rows that an object holds or makes, as it has them.

    Args:
        data: What `check_rows` let pass.
        length: Rows to take; None: all.
        name: What messages call it.

    Raises:
        BadDataError: There are fewer rows than ``length``.
    """
    count = 0
    for row in islice(_raw_rows(data), length):
        count += 1
        yield row
    if length is not None and count < length:
        raise BadDataError(f"{name}: there are {count} rows, and length={length} are to be taken")


def label(data: object) -> str:
    """Return what messages call an object: the name of its type, or of the function."""
    return str(getattr(data, "__name__", type(data).__name__))


def held_rows(data: Any, length: int | None) -> Any:
    """Return what gives its rows more than once: the object itself, or a list of what it makes."""
    return data if _is_sized(data) else list(islice(_raw_rows(data), length))


def summary(data: object, length: int | None = None) -> str:
    """Return the number of rows and the columns, as far as no row has to be made for that."""
    columns = getattr(data, "column_names", getattr(data, "columns", None))
    count = len(data) if isinstance(data, Sized) else None
    if isinstance(data, Mapping):
        columns, count = data, max(map(len, data.values()), default=0)
    elif isinstance(data, list | tuple) and data and isinstance(data[0], Mapping):
        columns = data[0]
    count_used = min(number for number in (count, length, math.inf) if number is not None)
    rows = "" if count_used == math.inf else f"{count_used:,} row{'s' if count_used != 1 else ''}"
    named = "" if columns is None else ", ".join(map(str, columns))
    return ": ".join(filter(None, (rows, named)))


def folder_of(data: object) -> Path | None:
    """Return where relative paths in the rows start from.

    Rows that were loaded from the Hugging Face hub name no files of this machine.
    """
    if isinstance(data, _HubRows):
        sources = data.info.download_checksums or {}
        if any(str(source).startswith("hf://") for source in sources):
            return FOREIGN
    return None


def _raw_rows(data: Any) -> Iterator[Any]:
    if isinstance(data, _HubRows):
        return _hub_rows(data)
    if isinstance(data, _Frame):
        return iter(_frame_rows(data))
    if isinstance(data, _ArrowTable):
        return iter(_arrow_rows(data))
    if isinstance(data, Mapping):
        return (dict(zip(data, cells, strict=True)) for cells in zip(*data.values(), strict=True))
    if isinstance(data, Iterable):
        return iter(data)
    if isinstance(data, Rows):
        # not iter(): a torch data set need not end with an IndexError
        return (data[index] for index in range(len(data)))
    return iter(data())


def _hub_rows(data: Any) -> Iterator[Any]:
    """Go through a ``datasets.Dataset``, its media as the bytes or paths that it holds.

    Of one from the hub they are always bytes, because its rows may name no files.
    """
    if data.format["type"] == "custom":  # the user's own transform makes the rows
        return (data[index] for index in range(len(data)))
    schema = data.features
    features = type(schema)({name: _undecoded(value) for name, value in schema.items()})
    embeds = features != schema and folder_of(data) is FOREIGN
    package = importlib.import_module("datasets.table")
    tables = data.with_format("arrow", columns=data.format["columns"])
    # of few rows, as a table holds no more than 2 GiB of bytes
    return (
        features.decode_example(row)
        for table in tables.iter(batch_size=_EMBEDDED if embeds else 1000)
        # with the files that media columns name
        for row in rows_of_arrow(package.embed_table_storage(table) if embeds else table)
    )


def _undecoded(feature: Any) -> Any:
    """Switch off the decoding of media, which are read when a batch needs them."""
    package = importlib.import_module("datasets")  # loaded, as somebody holds one of its objects
    if isinstance(feature, package.Image | package.Video | package.Audio):
        return replace(feature, decode=False)
    if isinstance(feature, dict):
        return {name: _undecoded(value) for name, value in feature.items()}
    if isinstance(feature, list):  # a list as datasets 3 writes it
        return [_undecoded(value) for value in feature]
    if hasattr(feature, "feature"):
        return replace(feature, feature=_undecoded(feature.feature))
    return feature


def _frame_rows(data: _Frame) -> list[dict[Any, Any]]:
    _check_names(data, list(data.columns))
    rows: list[dict[Any, Any]] = data.astype(object).where(data.notna(), None).to_dict("records")
    return rows


def _arrow_rows(data: _ArrowTable) -> Iterator[dict[str, Any]]:
    table = importlib.import_module("pyarrow").table(data)
    _check_names(data, table.column_names)
    return (row for batch in table.to_batches() for row in rows_of_arrow(batch))


def rows_of_arrow(table: Any) -> list[dict[str, Any]]:
    """Return the rows of an Arrow table or batch, its maps as mappings.

    Raises:
        BadDataError: A map has a key twice, or a struct a field.
    """
    try:
        rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
    except (KeyError, ValueError) as error:
        raise BadDataError(f"a row of an Arrow table cannot be read: {error}") from error
    return rows


def _check_names(data: object, names: Sequence[Any]) -> None:
    if (twice := first_twice(names)) is not None:
        raise BadDataError(f"the {label(data)} has several columns {twice!r}: rename them")


def _check_columns(data: Mapping[Any, Any], what: str) -> None:
    for name, column in data.items():
        if not isinstance(column, Rows) or isinstance(column, str | bytes | Mapping):
            kind = type(column).__name__
            raise BadDataError(
                f"{what}: a dict holds columns, each a list of the same length, and its {name!r} "
                f"is {_article(kind)} {kind}; a row is written in a list, [{{…}}]"
            )
    lengths = {name: len(column) for name, column in data.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name!r} {length}" for name, length in lengths.items())
        raise BadDataError(f"{what}: the columns of the dict have different lengths: {listed}")


def is_table(value: object) -> bool:
    """Whether it has named columns, as a DataFrame or a data set of the hub has."""
    return hasattr(value, "columns") or hasattr(value, "column_names")


def _is_sized(data: object) -> bool:
    return isinstance(data, Sized) and isinstance(data, Rows | Iterable)


def _article(word: str) -> str:
    return "an" if word[:1].lower() in "aeiou" else "a"
