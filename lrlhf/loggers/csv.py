"""Metrics in a CSV file that is the same however often the run was killed."""

from __future__ import annotations

import csv
import io
import os
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from torch import Tensor

from lrlhf.arguments import KeepsArguments
from lrlhf.run.atomic import atomic_write, naming
from lrlhf.run.numbered_files import move_to_numbered


class LocalFolder:
    """Where the files of a logger are: the folder that it was given, else the run folder."""

    _folder: Path
    _in_run_folder: bool

    def choose_folder(self, save_dir: Path | str | None) -> None:
        """Take a folder, or the working folder until a trainer says which the run folder is.

        Raises:
            ValueError: It has a protocol, and what is there could not be cut back.
        """
        self._in_run_folder = save_dir is None
        self._folder = self._local("." if save_dir is None else save_dir)

    def use_run_folder(self, folder: Path | str) -> None:
        """Write there, unless a folder was given."""
        if self._in_run_folder:
            self._folder = self._local(folder)

    @property
    def save_dir(self) -> str:
        return str(self._folder)

    def _local(self, folder: Path | str) -> Path:
        if "://" in str(folder):
            raise ValueError(
                f"{type(self).__name__} save_dir is {folder}: it needs a folder of this machine, "
                "whose files it can cut back when a run is resumed"
            )
        return Path(folder)


_AXES = ("step", "epoch")
_CLOCKED = ("perf/", "rewards/remote/", "rewards/isolated/")
"""What depends on clocks, networks and other processes."""
Row = dict[str, str]


class ResumingCSVLogger(KeepsArguments, LocalFolder, CSVLogger):
    """Writes ``metrics.csv``, each row at once, and goes on with it when a run is resumed.

    What a clock measured is in ``timings.csv`` beside it, so that ``metrics.csv`` of a run that was
    killed and resumed is byte for byte that of one that was not. A run that starts from the
    beginning where an earlier one has written keeps that one's files as ``metrics.1.csv`` (``.2``,
    …). An evaluation by itself writes ``validate.csv`` or ``test.csv``.

    Args:
        save_dir: Folder of the files; None: the run folder of `lrlhf.Trainer`, and until one says
            which it is, the working folder.
        name: Folder inside it; None: the files are in the folder itself.
        timings: Beginnings of the names of metrics that differ between two equal runs.

    Raises:
        ValueError: The folder is not one of this machine's.
    """

    def __init__(
        self,
        save_dir: str | Path | None = None,
        name: str | None = None,
        timings: Sequence[str] = _CLOCKED,
    ) -> None:
        self.choose_folder(save_dir)
        super().__init__(self.save_dir, name=name, version="")
        self._clocked = tuple(timings)
        self._hyperparameters: dict[str, Any] = {}
        self._tables: dict[str, CSVTable] = {}
        """By name of the file: of the metrics, then of the timings; empty until the run begins."""

    @property
    def log_dir(self) -> str:
        """Folder of the files."""
        return str(Path(self.save_dir, self.name))

    @property
    def experiment(self) -> Any:
        """The logger itself: what Lightning's would be removes the files of an earlier run."""
        return self

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace | None = None) -> None:
        self._hyperparameters |= vars(params) if isinstance(params, Namespace) else params or {}
        Path(self.log_dir).mkdir(parents=True, exist_ok=True)
        save_hparams_to_yaml(Path(self.log_dir, "hparams.yaml"), self._hyperparameters)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if not self._tables:
            self.start_run()
        measured, timings = self._tables.values()
        named = dict(metrics)
        axes: dict[str, Any] = {"step": measured.rows if step is None else step}
        axes |= {name: named.pop(name) for name in _AXES if name in named}
        clocked = {k: named.pop(k) for k in list(named) if self._is_clocked(k)}
        for table, values in ((measured, named), (timings, clocked)):
            if values:
                table.append(axes | values)

    def _is_clocked(self, name: str) -> bool:
        """Whether a metric differs between equal runs, also where its function's name is in it."""
        area, _, rest = name.partition("/")
        of_kind = f"{area}/{rest.partition('/')[2]}" if area == "rewards" else name
        return name.startswith(self._clocked) or of_kind.startswith(self._clocked)

    def save(self) -> None:
        """Do nothing: the rows are on file."""

    def finalize(self, status: str) -> None:
        """Do nothing: the rows are on file."""

    # ---- what `ResumableLog` asks for

    def log_position(self) -> dict[str, Any]:
        for table in self._tables.values():
            table.sync()
        return {name: table.rows for name, table in self._tables.items()}

    def rewind(self, position: Mapping[str, Any]) -> None:
        self._open("metrics", "timings")
        for name, table in self._tables.items():
            saved = position.get(name, 0)
            existing = table.truncate(saved)
            if existing < saved:
                rank_zero_warn(
                    f"{table.path} has {existing} rows, and the checkpoint was saved after "
                    f"{saved}: the others are not there, and the run goes on without them"
                )

    def start_run(self) -> None:
        self._open("metrics", "timings")
        paths = [table.path for table in self._tables.values()]
        move_to_numbered("ResumingCSVLogger", paths, [path for path in paths if path.exists()])

    def for_stage(self, stage: str) -> ResumingCSVLogger:
        evaluation = copy(self)
        evaluation._open(stage, f"{stage}_timings")
        for table in evaluation._tables.values():
            table.truncate()
        return evaluation

    def _open(self, *names: str) -> None:
        self._tables = {name: CSVTable(Path(self.log_dir, f"{name}.csv")) for name in names}


@rank_zero_only
class CSVTable:
    """A CSV file that grows by rows and by columns; each row is in it when `append` returns.

    A column that is new is put in its place by rewriting the file in one step: ``step`` and
    ``epoch`` first, the others by name, so that the file does not tell when it was interrupted.
    What an earlier process wrote is read by `truncate` only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = 0
        self._columns: list[str] = []
        self._end = 0

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row; what was in the file is still there when that fails."""
        cells = {name: _cell(value) for name, value in row.items()}
        if cells.keys() <= set(self._columns):
            data = _lines([[cells.get(name, "") for name in self._columns]])
            with naming(self.path), self.path.open("r+b") as handle:
                # what did not fit on the disk may have left its beginning behind
                handle.seek(self._end)
                handle.truncate()
                handle.write(data)
            self._end += len(data)
        else:
            self._rewrite({*self._columns, *cells}, [*self._read()[: self.rows], cells])
        self.rows += 1

    def truncate(self, rows: int | None = None) -> int:
        """Keep the first rows (None: all that are whole) and the columns that they fill.

        Returns:
            How many rows there were.
        """
        existing = self._read()
        rest = existing[:rows]
        self.rows = len(rest)
        if self.path.exists():
            self._rewrite({name for row in rest for name, cell in row.items() if cell}, rest)
        return len(existing)

    def sync(self) -> None:
        """Bring the rows to the disk, where they outlast the machine too."""
        if self.path.exists():
            with self.path.open("rb") as handle:
                os.fsync(handle.fileno())

    def _read(self) -> list[Row]:
        """Read the whole rows: a kill may have cut the last one short."""
        data = self.path.read_bytes() if self.path.exists() else b""
        try:
            text = data[: data.rfind(b"\n") + 1].decode()
            reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
            rows = []
            for row in reader:
                if None in row or None in row.values():
                    raise csv.Error(f"line {reader.line_num}: more or fewer cells than the header")
                rows.append(row)
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(
                f"{self.path} is no table of metrics ({error}); mend it or move it away, or choose "
                "another folder for the logger"
            ) from error
        return rows

    def _rewrite(self, names: Iterable[str], rows: Iterable[Row]) -> None:
        columns = sorted(names, key=lambda name: (name not in _AXES, name == "epoch", name))
        cells = [[row.get(name, "") for name in columns] for row in rows]
        data = _lines([columns, *cells]) if columns else b""
        with atomic_write(self.path) as handle:
            handle.write(data)
        self._columns, self._end = columns, len(data)


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
