"""Where callbacks write."""

from __future__ import annotations

from pathlib import Path

import lightning as L

from lrlhf.strategies.atomic import atomic_folder, atomic_write
from lrlhf.strategies.run_folder import is_trial, run_folder

__all__ = ["atomic_folder", "atomic_write", "output_folder"]


def output_folder(trainer: L.Trainer, dirpath: str | Path | None) -> Path:
    """Return the folder that a callback writes to.

    ``dirpath`` if given, else the folder of the first logger that has one of its own, else the
    trainer's ``default_root_dir``. Under ``fast_dev_run`` a folder of that name inside it, so
    that a trial never touches the results of a run.
    """
    if dirpath is None:
        return run_folder(trainer)
    return Path(dirpath) / "fast_dev_run" if is_trial(trainer) else Path(dirpath)
