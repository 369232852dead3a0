"""Metrics in a CSV file that is the same however often the run was killed."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import CSVLogger
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
        self._start = f"{prefix}-" if prefix else ""
        self._clocked = tuple(f"{self._start}{mark}" for mark in timings)
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
            self.start_over()
        measured, timings = self._tables.values()
        named = {f"{self._start}{name}": value for name, value in metrics.items()}
        axes: dict[str, Any] = {"step": measured.rows if step is None else step}
        axes |= {name: named.pop(name) for name in _AXES if name in named}
        clocked = {k: named.pop(k) for k in list(named) if k.startswith(self._clocked)}
        for table, values in ((measured, named), (timings, clocked)):
            if values:
                table.append(axes | values)

    def save(self) -> None:
        """Do nothing: the rows are on file."""

    def finalize(self, status: str) -> None:
        """Do nothing: the rows are on file."""

    # ---- what `ResumableLog` asks for

    def log_position(self) -> dict[str, Any]:
        for table in self._tables.values():
            table.sync()
        return {name: table.rows for name, table in self._tables.items()}

    def go_back(self, position: Mapping[str, Any]) -> None:
        self._open("metrics", "timings")
        for name, table in self._tables.items():
            kept = position.get(name, 0)
            found = table.cut_back(kept)
            if found < kept:
                rank_zero_warn(
                    f"{table.path} has {found} rows, and the checkpoint was saved after {kept}: "
                    "the others are not there, and the run goes on without them"
                )

    def start_over(self) -> None:
        self._open("metrics", "timings")
        paths = [table.path for table in self._tables.values()]
        set_aside("ResumingCSVLogger", paths, [path for path in paths if path.exists()])

    def stand_apart(self, stage: str) -> None:
        self._open(stage, f"{stage}_timings")
        for table in self._tables.values():
            table.cut_back()

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
