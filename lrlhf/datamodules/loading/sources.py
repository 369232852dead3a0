"""Where rows come from: files, folders, hub data sets, and objects that make their own."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import chain, count
from pathlib import Path
from typing import Any, Generic, TypeGuard, TypeVar, cast

import torch
from torch.utils.data import DataLoader

from lrlhf.datamodules.loading.files import FORMATS, is_data_file, read_rows_of_file
from lrlhf.datamodules.loading.plain_rows import plain_row
from lrlhf.datamodules.loading.python_rows import (
    RowMaker,
    Rows,
    check_rows,
    folder_of,
    held_rows,
    label,
    read_rows,
    summary,
)
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow
from lrlhf.media.path_safety import FOREIGN
from lrlhf.options.errors import nearest_path
from lrlhf.secrets import hide

Row = Mapping[str, Any]

_HUB_ID = re.compile(
    r"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.+\[\]:%-]+))?"
)
_SAVED_TO_DISK = ("dataset_info.json", "dataset_dict.json")


class Source(ABC):
    """Rows of named columns, in an order that never changes.

    Implement it to bring data of your own; in YAML it is given by ``class_path``.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """What messages call it."""

    @abstractmethod
    def rows(self) -> Iterable[Row | BadRow]:
        """Go through the rows; a ``BadRow`` stands for one that could not be read at all."""

    def __iter__(self) -> Iterator[Row | BadRow]:
        """Go through the rows in the form that they have from every source, see `plain_row`."""
        return map(plain_row, self.rows())

    @property
    def folder(self) -> Path | None:
        """Where relative paths in the rows start from; None: there is no such place."""
        return None

    def prepare(self) -> None:
        """Download or compute what `rows` needs; called on one process of each machine."""
        return

    def __repr__(self) -> str:
        return f"{type(self).__name__}({hide(self.name)!r})"


class MemorySource(Source):
    """Rows that a Python object holds or makes.

    ``train`` and ``val`` take such an object as it is. This class gives it a name, says where
    relative paths in its rows start from, or takes a number of rows from what has no length.

    Args:
        data: A list of dicts, a dict of columns, a DataFrame, an Arrow table, a
            ``datasets.Dataset``, another object with ``__len__`` and ``__getitem__``; with
            ``length`` also an iterator, or a function that makes one.
        length: Rows to take, the first ones; None: all.
        name: What messages call it; None: its type.
        folder: What relative paths of images and videos start from; None: the folder in which the
            program runs.

    Raises:
        BadDataError: ``data`` holds no rows, or does not know how many.
    """

    def __init__(
        self,
        data: Rows | RowMaker | Iterable[Row],
        length: int | None = None,
        name: str | None = None,
        folder: str | Path | None = None,
    ) -> None:
        if length is not None and length < 1:
            raise ValueError(f"length={length}: give 1 or more")
        check_rows(data, type(self).__name__, length=length)
        self._data: Any = data
        self._length = length
        self._name = name or label(data)
        self._numbered = None if name else label(data)
        self._folder = folder_of(data) if folder is None else Path(folder).expanduser()

    @property
    def name(self) -> str:
        return self._name

    @property
    def folder(self) -> Path | None:
        return self._folder

    def rows(self) -> Iterable[Row | BadRow]:
        # of an iterator the rows come once, and are read again where the tokenizer changes
        self._data = held_rows(self._data, self._length)
        return read_rows(self._data, self._length, name=self._name)

    def number(self, number: int) -> None:
        """Tell it apart from the others of a list, where it has no name of its own."""
        if self._numbered is not None:
            self._name = f"{self._numbered} {number}"

    def __repr__(self) -> str:
        described = summary(self._data, self._length)
        return f"{type(self).__name__}({self.name}, {described})"


@dataclass(frozen=True)
class Weighted:
    """One entry of a list of sources, with its share of an epoch.

    Args:
        source: A file, folder, pattern, hub id or `Source`; from Python also rows, see
            `MemorySource`.
        weight: Share of an epoch relative to the other entries' weights; either every entry of a
            list has one, or none. Without weights every row comes once per epoch.
        columns: Columns that are set on every row of this source, such as ``{head: helpful}``.
    """

    source: str | Source | Rows
    weight: float | None = None
    columns: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.source, Source):
            # of a path from pathlib its text; rows as a source, which does not print them all
            text = str(self.source) if isinstance(self.source, Path) else self.source
            source = text if isinstance(text, str) else MemorySource(text)
            object.__setattr__(self, "source", source)
        if self.weight is not None and not 0 < self.weight < float("inf"):
            raise ValueError(f"weight of {self.source!r} is {self.weight}: give a number above 0")


Data = str | Source | Rows | list[str | Source | Rows | Weighted]
"""What ``train`` and ``val`` of a data module take."""
Entries = Data | Sequence[Weighted]


@dataclass(frozen=True)
class Component:
    """One entry after its string was resolved; the unit of a weighted mixture."""

    sources: tuple[Source, ...]
    weight: float | None
    columns: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What messages, and the line about the mixture, call it."""
        first = self.sources[0].name
        return first if len(self.sources) == 1 else f"{first} and {len(self.sources) - 1} more"


class FileSource(Source):
    """The rows of one file.

    Args:
        path: A .jsonl, .json, .parquet or .csv file, each optionally .gz or .zst.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser()

    @property
    def name(self) -> str:
        return str(self._path)

    @property
    def folder(self) -> Path | None:
        return self._path.parent

    def rows(self) -> Iterable[Row | BadRow]:
        return read_rows_of_file(self._path)


class HubSource(Source):
    """A data set of the Hugging Face hub, or of its cache on this machine.

    Args:
        dataset: ``owner/name``, with ``:config`` and ``@split`` where wanted, such as
            ``openai/gsm8k:main@train``. The split is ``train`` unless given.
    """

    def __init__(self, dataset: str) -> None:
        match = _HUB_ID.fullmatch(dataset)
        if match is None:
            raise ValueError(
                f"{dataset!r} is no hub id; write owner/name or owner/name:config@split (rows from "
                "Python are dicts: [{'prompt': …}])"
            )
        self._dataset = dataset
        self._id, self._config = match["id"], match["config"]
        self._split = match["split"] or "train"

    @property
    def name(self) -> str:
        return self._dataset

    @property
    def dataset_id(self) -> str:
        """Without config and split."""
        return self._id

    @property
    def folder(self) -> Path | None:
        return FOREIGN

    def prepare(self) -> None:
        self._load()

    def rows(self) -> Iterable[Row | BadRow]:
        return read_rows(self._load(), name=self.name)

    def _load(self) -> Rows:
        datasets = import_module("datasets")  # with pyarrow and pandas, half a second
        try:
            rows: Rows = datasets.load_dataset(self._id, self._config, split=self._split)
            return rows
        except (OSError, ValueError) as error:
            near = nearest_path(Path(self._dataset))
            raise BadDataError(
                f"cannot load {self._dataset!r}: there is no such file or folder here{near}, and "
                f"as a hub data set (id {self._id!r}, config {self._config!r}, split "
                f"{self._split!r}) it failed with: {error}. Give the path of a local file, or the "
                "id of a data set that this machine can reach or has in its cache"
            ) from error


def entries_of(value: Entries, what: str) -> list[Weighted]:
    """List the entries of what a user gave; the data that Python objects hold is not read yet.

    Args:
        value: One source, a list of them, or rows.
        what: What messages call it, such as ``train``.

    Raises:
        BadDataError: There are none, or an object holds no rows.
    """
    if not _is_list_of_sources(value):
        return [_entry(value, what)]
    if not value:
        raise BadDataError(f"{what}: the list of data sources is empty: give at least one")
    row = next((index for index, one in enumerate(value) if isinstance(one, Mapping)), None)
    if row is not None:
        raise BadDataError(
            f"{what}[{row}] is a dict and {what}[0] {value[0]!r:.40} is not: a list holds either "
            "rows, all of them dicts, or sources"
        )
    entries = [_entry(one, f"{what}[{index}]") for index, one in enumerate(value)]
    if len(entries) > 1:
        for number, entry in enumerate(entries, start=1):
            if isinstance(entry.source, MemorySource):
                entry.source.number(number)
    return entries


def _entry(entry: Any, what: str) -> Weighted:
    if isinstance(entry, Weighted):
        return entry
    if not isinstance(entry, str | Path | Source):
        check_rows(entry, what)
    return Weighted(entry)


def _is_list_of_sources(value: Any) -> TypeGuard[Sequence[Any]]:
    rows = isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], Mapping)
    return isinstance(value, list | tuple) and not rows


def components_of(entries: Entries) -> list[Component]:
    """Resolve what a user gave as ``train`` or ``val``.

    Raises:
        ValueError: A file is missing, or some entries have a weight and some none.
    """
    weighted = entries_of(entries, "data")
    without = [entry.source for entry in weighted if entry.weight is None]
    if 0 < len(without) < len(weighted):
        raise ValueError(
            f"{without[0]!r} has no weight while other sources have one: give every entry of the "
            "list a weight (an epoch is shared out by weight), or none (every row once per epoch)"
        )
    return [
        Component(
            resolve_source(cast("str | Source", entry.source)),
            entry.weight,
            dict(entry.columns or {}),
        )
        for entry in weighted
    ]


def resolve_source(source: str | Source) -> tuple[Source, ...]:
    """Turn a file, folder, pattern or hub id into sources, one per file."""
    if isinstance(source, Source):
        return (source,)
    path = Path(source).expanduser()
    if path.is_file():
        return (FileSource(str(path)),)
    if path.is_dir():
        if any((path / name).is_file() for name in _SAVED_TO_DISK):
            raise BadDataError(
                f"the folder {source!r} is what save_to_disk of datasets wrote: give its rows from "
                "Python (datasets.load_from_disk), or write them with to_parquet"
            )
        return _files(source, sorted(path.iterdir()), f"the folder {source!r}")
    if path.exists():
        raise BadDataError(f"{source!r} is a pipe or a device, not a file: write its rows to one")
    if any(character in source for character in "*?[") and "@" not in source:
        anchor = Path(path.anchor) if path.is_absolute() else Path()
        pattern = str(path.relative_to(path.anchor)) if path.is_absolute() else str(path)
        return _files(source, sorted(anchor.glob(pattern)), f"the pattern {source!r}")
    if is_data_file(path) or source.startswith(("/", "./", "../", "~")) or not source:
        raise BadDataError(f"there is no file or folder {source!r}{nearest_path(path)}")
    return (HubSource(source),)


def distinct_names(sources: Iterable[str]) -> dict[str, str]:
    """Return a short name for each source that can be a part of a metric's.

    That is the last part of a path without the ending of data files, ``helpful`` for
    ``data/helpful.jsonl``; where two would be the same, all of the path without slashes, and a
    number where these are the same too.
    """
    safe_names = {
        source: re.sub(r"[^\w.@:=-]+", "_", hide(source)).strip("_") or "_" for source in sources
    }
    last = {each: each.rstrip("/").rpartition("/")[2] for each in safe_names}
    short = {
        one: re.sub(
            r"[^\w.@:=-]+", "_", re.sub(r"\.(jsonl?|parquet|csv)(\.(gz|zst))?$", "", hide(end))
        )
        for one, end in last.items()
    }
    return short if len({*short.values()} - {""}) == len(short) else _numbered(safe_names)


def _numbered(names: Mapping[str, str]) -> dict[str, str]:
    """Append _2, _3, … to names that are there before."""
    distinct: dict[str, str] = {}
    for one, name in names.items():
        further = (f"{name}_{number}" for number in count(2))
        tried = chain([name], further)
        distinct[one] = next(name for name in tried if name not in distinct.values())
    return distinct


def _files(source: str, paths: Sequence[Path], what: str) -> tuple[Source, ...]:
    files = [path for path in paths if path.is_file() and is_data_file(path)]
    if not files:
        special = [path.name for path in paths if not (path.is_file() or path.is_dir())]
        other = f" but pipes or devices ({', '.join(map(repr, special))})" if special else ""
        raise BadDataError(
            f"{what} holds no data file{other or nearest_path(Path(source))}; readable are "
            f"{', '.join(sorted(FORMATS))}, each optionally with .gz or .zst"
        )
    return tuple(FileSource(str(path)) for path in files)


logger = logging.getLogger(__name__)

RowT = TypeVar("RowT")
BatchT = TypeVar("BatchT")

_MOST_IN_A_ROW = 100

Problems = list[tuple[str, str]]
"""Reason and detail of each row that another one stands in for."""


class LostWorkerError(RuntimeError):
    """A worker process of a loader ended before its work."""


@dataclass(frozen=True)
class ReadRows(Generic[RowT]):
    """Rows that are read when they are asked for, with what was wrong with those before them."""

    rows: Sequence[RowT]
    read: Callable[[RowT], RowT] | None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[RowT, Problems]:
        if self.read is None:
            return self.rows[index], []
        problems: Problems = []
        # which row stands in depends on the data alone, so a resumed run takes the same one
        for position in range(index, index + min(len(self.rows), _MOST_IN_A_ROW)):
            try:
                return self.read(self.rows[position % len(self.rows)]), problems
            except BadRow as problem:
                problems.append((problem.reason, problem.detail))
        shown = "\n".join(f"{reason}: {detail}" for reason, detail in problems[:5])
        raise BadDataError(f"{len(problems)} rows in a row cannot be used, the first are\n{shown}")


@dataclass(frozen=True)
class Fetching(Generic[RowT, BatchT]):
    """How rows become batches.

    Args:
        collate: Makes a batch of rows; must be picklable to reach worker processes.
        num_workers: Processes that read and collate; 0: the training process does.
        pin_memory: Pin batches for an asynchronous copy to a GPU.
        read: Reads what a row only names, such as images; raises `BadRow` on one that turns out to
            be unusable. The next usable row takes its place, which is logged.
        drop: Leave unusable rows out, where each row is to come once; a batch that would be empty
            gets one other row.
    """

    collate: Callable[[Sequence[RowT]], BatchT]
    num_workers: int = 0
    pin_memory: bool = False
    read: Callable[[RowT], RowT] | None = None
    drop: bool = False
    unusable: Counter[str] = field(default_factory=Counter)
    """Rows that turned out to be unusable during training, by reason."""

    def batches(self, rows: Sequence[RowT], batches: Sequence[Sequence[int]]) -> Iterator[BatchT]:
        """Go through batches of the given row indices."""
        loader: DataLoader[tuple[BatchT, Problems]] = DataLoader(
            ReadRows(rows, self.read),  # type: ignore[arg-type]  # a map-style data set
            batch_sampler=[list(batch) for batch in batches],
            collate_fn=self._collate,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            # its own generator: else every epoch takes a number from the global one, and what is
            # sampled afterwards depends on how often a run was resumed
            generator=torch.Generator().manual_seed(0),
        )
        try:
            for batch, problems in loader:
                self._log(problems)
                yield batch
        except RuntimeError as error:
            # torch has no class of its own for it
            if not str(error).startswith("DataLoader worker"):
                raise
            raise LostWorkerError(
                f"a process that reads data is gone ({error}), mostly because memory ran out: "
                f"lower data.num_workers (it is {self.num_workers}), and go on with "
                "--ckpt_path last"
            ) from error

    def batch(self, rows: Sequence[RowT], batch: Sequence[int]) -> BatchT:
        """Make one batch in this process."""
        readable = ReadRows(rows, self.read)
        made, problems = self._collate([readable[row] for row in batch])
        self._log(problems)
        return made

    def _collate(self, read: Sequence[tuple[RowT, Problems]]) -> tuple[BatchT, Problems]:
        if self.drop:
            usable = [row for row, problems in read if not problems] or [read[0][0]]
        else:
            usable = [row for row, _ in read]
        return self.collate(usable), [problem for _, problems in read for problem in problems]

    def _log(self, problems: Problems) -> None:
        """Count unusable rows by reason; each reason is logged when its count doubles."""
        for reason, detail in problems:
            self.unusable[reason] += 1
            if self.unusable[reason].bit_count() == 1:
                logger.warning(
                    "a row could not be used and the next one took its place: %s: %s "
                    "(%d time(s) so far)",
                    reason,
                    detail,
                    self.unusable[reason],
                )
