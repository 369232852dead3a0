"""TensorBoard events that are those of one run, however often it was killed."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn

from lrlhf.arguments import KeepsArguments
from lrlhf.loggers.csv import LocalFolder
from lrlhf.run.atomic import naming
from lrlhf.run.lightning_internals import forget_writer, open_writer

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class ResumingTensorBoardLogger(KeepsArguments, LocalFolder, TensorBoardLogger):
    """Writes events to one folder, each row at once, and cuts them back when a run is resumed.

    What the killed run wrote after the checkpoint is cut from its files, texts and images too; a
    TensorBoard that is open meanwhile shows it until it is started again. Each process writes a
    file of its own. A run that starts from the beginning where an earlier one has written moves
    that one's events to ``tensorboard.1`` (``.2``, …). An evaluation by itself writes to a folder
    inside, ``validate`` or ``test``.

    Args:
        save_dir: Folder of the run; None: that of `lrlhf.Trainer`, else the working folder.
        name: Folder of the events inside it.
        **kwargs: Those of Lightning's `TensorBoardLogger`.

    Raises:
        ValueError: The folder is not one of this machine's.
        ModuleNotFoundError: TensorBoard is not installed.
    """

    def __init__(
        self, save_dir: str | Path | None = None, name: str = "tensorboard", **kwargs: Any
    ) -> None:
        self.choose_folder(save_dir)
        super().__init__(self.save_dir, name=name, version="", **kwargs)
        self._stage = ""
        self._begun = False
        self._held_back: list[tuple[Any, ...]] = []
        """Hyperparameters of a run that may prove to have written them long ago."""
        self._others: set[Path] = set()
        """Event files that were there when the writer was opened."""

    @property
    def log_dir(self) -> str:
        """Folder of the events."""
        return str(Path(self.save_dir, self.name, self._stage))

    @property
    def root_dir(self) -> str:
        """Folder of the events of every stage."""
        return str(self._folder / self.name)

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """The writer of this process."""
        if open_writer(self) is None:
            self._others = _event_files(Path(self.log_dir))
            _await_a_later_name(self._others)
        writer: SummaryWriter = super().experiment
        return writer

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if not self._begun:
            self.start_run()
        with naming(Path(self.log_dir)):
            super().log_metrics(metrics, step)
            self.experiment.flush()

    @rank_zero_only
    def log_hyperparams(
        self,
        params: dict[str, Any] | Namespace,
        metrics: dict[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        if self._begun:
            super().log_hyperparams(params, metrics, step)
        else:
            self._held_back.append((params, metrics, step))

    # ---- what `ResumableLog` asks for

    def log_position(self) -> dict[str, Any]:
        with naming(Path(self.log_dir)):
            self.experiment.flush()
        files = _event_files(Path(self.log_dir))
        for file in files:
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        return {"files": {file.name: file.stat().st_size for file in files}}

    def rewind(self, position: Mapping[str, Any]) -> None:
        self._open_file()
        self._held_back.clear()
        sizes = dict(position["files"])
        for file in self._others:
            size = sizes.get(file.name, 0)
            if file.stat().st_size >= size:
                sizes.pop(file.name, None)
                os.truncate(file, size)
            if not size:
                file.unlink()
        for name in sizes:
            rank_zero_warn(
                f"{Path(self.log_dir) / name} has lost events from before the checkpoint; the run "
                "goes on without them"
            )

    def start_run(self) -> None:
        self._open_file()
        if self._others:
            folder, number = Path(self.log_dir), 1
            while (moved := folder.with_name(f"{folder.name}.{number}")).exists():
                number += 1
            moved.mkdir()
            for file in self._others:
                file.rename(moved / file.name)
            rank_zero_info(f"{type(self).__name__}: events of an earlier run are now in {moved}")
        for parameters in self._held_back:
            super().log_hyperparams(*parameters)
        self._held_back.clear()

    def for_stage(self, stage: str) -> ResumingTensorBoardLogger:
        if (writer := open_writer(self)) is not None and not self._begun:
            # the trainer opened it before the stage was known
            writer.close()
            forget_writer(self)
            for file in _event_files(Path(self.log_dir)) - self._others:
                file.unlink()
        evaluation = copy(self)  # which does not copy the writer
        evaluation._stage, evaluation._begun = stage, True
        return evaluation

    def _open_file(self) -> None:
        """Open a file for what follows; all `_others` are from before."""
        if (writer := open_writer(self)) is not None and self._begun:
            writer.close()
            forget_writer(self)
        _ = self.experiment
        self._begun = True


def _event_files(folder: Path) -> set[Path]:
    return set(folder.glob("events.out.tfevents.*"))


def _await_a_later_name(files: set[Path]) -> None:
    """Let the second pass in which a file was made.

    TensorBoard reads the files of a folder in the order of their names: second, host, process and
    number of the writer, all compared as text, so that writer 10 of a second comes before writer 9.
    """
    seconds = [int(file.name.split(".")[3]) for file in files]
    time.sleep(min(1.0, max(0.0, max(seconds, default=0) + 1 - time.time())))
