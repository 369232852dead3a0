"""Metrics in a CSV file that is the same however often the run was killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from lrlhf.loggers.csv_table import CSVTable
from lrlhf.run.checkpoints.set_aside import set_aside

_AXES = ("step", "epoch")
_CLOCKED = ("perf/", "rewards/remote/", "rewards/isolated/")
"""What depends on clocks, networks and other processes."""


class ResumingCSVLogger(CSVLogger):
    """Writes ``metrics.csv``, each row at once, and goes on with it when a run is resumed.

    What a clock measured is in ``timings.csv`` beside it, so that ``metrics.csv`` of a run that was
    killed and resumed is byte for byte that of one that was not. A run that starts from the
    beginning where an earlier one has written keeps that one's files as ``metrics.1.csv`` (``.2``,
    …). An evaluation by itself writes ``validate.csv`` or ``test.csv``.

    Args:
        save_dir: Folder of the run.
        name: Folder inside it; None: the files are in the folder itself.
        prefix: Put before the name of every metric, with a ``-``.
        timings: Beginnings of the names of metrics that differ between two equal runs.

    Raises:
        ValueError: The folder is not one of this machine's.
    """

    def __init__(
        self,
        save_dir: str | Path,
        name: str | None = None,
        prefix: str = "",
        timings: Sequence[str] = _CLOCKED,
    ) -> None:
        refuse_remote(save_dir, type(self).__name__)
        super().__init__(save_dir, name=name, version="", prefix=prefix)
        self._timings = tuple(timings)
        self._apart: str | None = None

    @property
    def log_dir(self) -> str:
        """Folder of the files."""
        return str(Path(self.save_dir, self.name))

    @property
    @rank_zero_experiment
    def experiment(self) -> RowWriter:
        """What writes the rows."""
        if self._experiment is None:
            marks = tuple(f"{self._prefix}-{mark}" for mark in self._timings)
            self._experiment = RowWriter(self.log_dir, marks if self._prefix else self._timings)
        assert isinstance(self._experiment, RowWriter)
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        super().log_metrics(dict(metrics), self.experiment.rows if step is None else step)

    # ---- what `ResumableLog` asks for

    def log_position(self) -> dict[str, Any]:
        position: dict[str, Any] = self.experiment.position()
        return position

    def go_back(self, position: Mapping[str, Any]) -> None:
        self.experiment.go_back(position)

    def start_over(self) -> None:
        self.experiment.start_over()

    def stand_apart(self, stage: str) -> None:
        self.experiment.stand_apart(stage)


class RowWriter(ExperimentWriter):
    """Writes rows to ``metrics.csv`` and ``timings.csv``.

    Until it is told otherwise, its first row begins a run.

    Args:
        log_dir: Folder of the files.
        timings: Beginnings of the names that go to ``timings.csv``.
    """

    def __init__(self, log_dir: str, timings: tuple[str, ...]) -> None:
        super().__init__(log_dir)
        self._timings = timings
        self._tables: dict[str, CSVTable] = {}

    @property
    def rows(self) -> int:
        """How many rows of metrics there are."""
        return next((table.rows for table in self._tables.values()), 0)

    def _check_log_dir_exists(self) -> None:
        """Leave what is there; Lightning's would remove it."""

    def log_metrics(self, metrics_dict: Mapping[str, Any], step: int | None = None) -> None:
        if not self._tables:
            self.start_over()
        metrics, timings = self._tables.values()
        axes: dict[str, Any] = {"step": self.rows if step is None else step}
        axes |= {name: metrics_dict[name] for name in _AXES if name in metrics_dict}
        clocked = {k: v for k, v in metrics_dict.items() if k.startswith(self._timings)}
        rest = {k: v for k, v in metrics_dict.items() if k not in clocked and k not in axes}
        if rest:
            metrics.append(axes | rest)
        if clocked:
            timings.append(axes | clocked)

    def save(self) -> None:
        """Do nothing: the rows are on file."""

    def position(self) -> dict[str, Any]:
        """How many rows and which columns each file has, once they are on the disk."""
        for table in self._tables.values():
            table.sync()
        return {
            name: {"rows": table.rows, "columns": list(table.columns)}
            for name, table in self._tables.items()
        }

    def go_back(self, position: Mapping[str, Any]) -> None:
        """Forget the rows and columns that came after a position."""
        self._open("metrics", "timings")
        for name, table in self._tables.items():
            kept = position.get(name, {"rows": 0, "columns": []})
            found = table.go_back(kept["rows"], kept["columns"])
            if found < kept["rows"]:
                rank_zero_warn(
                    f"{table.path} has {found} rows, and the checkpoint was saved after "
                    f"{kept['rows']}: the others are not there, and the run goes on without them"
                )

    def start_over(self) -> None:
        """Rename the files of an earlier run."""
        self._open("metrics", "timings")
        names = [table.path for table in self._tables.values()]
        old = [path for path in names if path.exists()]
        set_aside("ResumingCSVLogger", names, old)

    def stand_apart(self, stage: str) -> None:
        """Add rows to files named after an evaluation."""
        self._open(stage, f"{stage}_timings")
        for table in self._tables.values():
            table.take_up()

    def _open(self, *names: str) -> None:
        self._tables = {name: CSVTable(Path(self.log_dir, f"{name}.csv")) for name in names}


@rank_zero_only
def refuse_remote(folder: str | Path, who: str) -> None:
    """Refuse a folder that is not a path: what is there could not be cut back.

    Raises:
        ValueError: It has a protocol.
    """
    if "://" in str(folder):
        raise ValueError(
            f"{who} save_dir is {folder}: it needs a folder of this machine, whose files it can "
            "cut back when a run is resumed"
        )
