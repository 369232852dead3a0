"""Where callbacks write."""

from __future__ import annotations

from pathlib import Path

import lightning as L

from lrlhf.run.atomic import atomic_folder, atomic_write
from lrlhf.run.folder_lock import hold_folder
from lrlhf.run.run_folder import is_trial, run_folder

__all__ = ["atomic_folder", "atomic_write", "hold_output_folder", "output_folder"]


def output_folder(trainer: L.Trainer, dirpath: str | Path | None) -> Path:
    """Return the folder that a callback writes to.

    ``dirpath`` if given, else the folder of the first logger that has one of its own, else the
    trainer's ``default_root_dir``. Under ``fast_dev_run`` a folder of that name inside it, so
    that a trial never touches the results of a run.
    """
    if dirpath is None:
        return run_folder(trainer)
    return Path(dirpath) / "fast_dev_run" if is_trial(trainer) else Path(dirpath)


def hold_output_folder(trainer: L.Trainer, dirpath: str | Path | None, stage: str) -> None:
    """Refuse a training run whose folder another one writes to; see `hold_folder`.

    A logger sees to its own folder: those of this library hold it, Lightning's number it.

    Args:
        trainer: Of the run; all ranks call, from ``setup``.
        dirpath: As for `output_folder`.
        stage: An evaluation holds nothing: it may look at a run that goes on.
    """
    of_logger = dirpath is None and any(log.log_dir is not None for log in trainer.loggers)
    if stage == "fit" and not of_logger:
        hold_folder(trainer, output_folder(trainer, dirpath))
