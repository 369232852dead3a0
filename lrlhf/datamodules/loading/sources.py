"""Where rows come from: files, folders, hub data sets, and objects that make their own."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from lrlhf.datamodules.loading.files import FORMATS, is_data_file, read_rows_of_file
from lrlhf.datamodules.loading.path_safety import FOREIGN
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow, nearest

Row = Mapping[str, Any]

_HUB_ID = re.compile(
    r"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.+\[\]:%-]+))?"
)


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

    @property
    def folder(self) -> Path | None:
        """Where relative paths in the rows start from; None: there is no such place."""
        return None

    def prepare(self) -> None:
        """Download or compute what `rows` needs; called on one process of each machine."""
        return


@dataclass(frozen=True)
class Weighted:
    """One entry of a list of sources, with its share of an epoch.

    Args:
        source: A file, folder, pattern, hub id or `Source`.
        weight: Share of an epoch relative to the other entries' weights; either every entry of a
            list has one, or none. Without weights every row comes once per epoch.
        columns: Columns that are set on every row of this source, such as ``{head: helpful}``.
    """

    source: str | Source
    weight: float | None = None
    columns: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.weight is not None and not 0 < self.weight < float("inf"):
            raise ValueError(f"weight of {self.source!r} is {self.weight}: give a number above 0")


Entries = str | Source | Sequence[str | Source | Weighted]


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
        path: A .jsonl, .json, .parquet or .csv file, each optionally .gz.
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
            raise ValueError(f"{dataset!r} is no hub id; write owner/name, owner/name:config@split")
        self._dataset = dataset
        self._id, self._config = match["id"], match["config"]
        self._split = match["split"] or "train"

    @property
    def name(self) -> str:
        return self._dataset

    @property
    def folder(self) -> Path | None:
        return FOREIGN

    def prepare(self) -> None:
        self._load()

    def rows(self) -> Iterable[Row | BadRow]:
        yield from self._load()

    def _load(self) -> Iterable[Row]:
        datasets = import_module("datasets")  # with pyarrow and pandas, half a second
        try:
            rows: Iterable[Row] = datasets.load_dataset(self._id, self._config, split=self._split)
            return rows
        except (OSError, ValueError) as error:
            near = nearest_path(Path(self._dataset))
            raise BadDataError(
                f"cannot load {self._dataset!r}: there is no such file or folder here{near}, and "
                f"as a hub data set (id {self._id!r}, config {self._config!r}, split "
                f"{self._split!r}) it failed with: {error}. Give the path of a local file, or the "
                "id of a data set that this machine can reach or has in its cache"
            ) from error


def components_of(entries: Entries) -> list[Component]:
    """Resolve what a user gave as ``train`` or ``val``.

    Raises:
        ValueError: A file is missing, or some entries have a weight and some none.
    """
    listed = [entries] if isinstance(entries, str | Source) else list(entries)
    if not listed:
        raise ValueError("the list of data sources is empty: give at least one")
    weighted = [entry if isinstance(entry, Weighted) else Weighted(entry) for entry in listed]
    without = [entry.source for entry in weighted if entry.weight is None]
    if 0 < len(without) < len(weighted):
        raise ValueError(
            f"{without[0]!r} has no weight while other sources have one: give every entry of the "
            "list a weight (an epoch is shared out by weight), or none (every row once per epoch)"
        )
    return [
        Component(resolve_source(entry.source), entry.weight, dict(entry.columns or {}))
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
        return _files(source, sorted(path.iterdir()), f"the folder {source!r}")
    if any(character in source for character in "*?[") and "@" not in source:
        anchor = Path(path.anchor) if path.is_absolute() else Path()
        pattern = str(path.relative_to(path.anchor)) if path.is_absolute() else str(path)
        return _files(source, sorted(anchor.glob(pattern)), f"the pattern {source!r}")
    if is_data_file(path) or source.startswith(("/", "./", "../", "~")) or not source:
        raise BadDataError(f"there is no file or folder {source!r}{nearest_path(path)}")
    return (HubSource(source),)


def _files(source: str, paths: Sequence[Path], what: str) -> tuple[Source, ...]:
    files = [path for path in paths if path.is_file() and is_data_file(path)]
    if not files:
        raise BadDataError(
            f"{what} holds no data file{nearest_path(Path(source))}; readable are "
            f"{', '.join(sorted(FORMATS))}, each optionally with .gz"
        )
    return tuple(FileSource(str(path)) for path in files)


def nearest_path(path: Path) -> str:
    """Say which entry beside a missing path has the nearest name, or where it was looked for."""
    folder = path.parent
    if not folder.is_dir():
        return f" (nor is there a folder {str(folder)!r})"
    near = nearest(path.name, (entry.name for entry in folder.iterdir()))
    return near or f" in {str(folder.resolve())!r}"
