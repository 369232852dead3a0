"""Where callbacks write."""

from __future__ import annotations

from pathlib import Path

import lightning as L

from lrlhf.strategies.atomic import atomic_folder, atomic_write

__all__ = ["atomic_folder", "atomic_write", "output_folder"]


def output_folder(trainer: L.Trainer, dirpath: str | Path | None) -> Path:
    """Return the folder that a callback writes to.

    ``dirpath`` if given, else the folder of the first logger that has one of its own, else the
    trainer's ``default_root_dir``. Under ``fast_dev_run`` a folder of that name inside it, so
    that a trial never touches the results of a run.
    """
    folder = Path(dirpath) if dirpath is not None else _run_folder(trainer)
    return folder / "fast_dev_run" if _is_trial(trainer) else folder


def _run_folder(trainer: L.Trainer) -> Path:
    # fast_dev_run replaces the loggers by one that answers every question with a function
    loggers = [] if _is_trial(trainer) else trainer.loggers
    folders = [logger.log_dir for logger in loggers if logger.log_dir is not None]
    return Path(folders[0] if folders else trainer.default_root_dir)


def _is_trial(trainer: L.Trainer) -> bool:
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]  # set outside its class
