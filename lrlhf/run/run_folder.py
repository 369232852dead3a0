"""The folder that belongs to a run."""

from __future__ import annotations

from pathlib import Path

import lightning as L


def run_folder(trainer: L.Trainer) -> Path:
    """Return the folder of the first logger that has one of its own, else ``default_root_dir``.

    Under ``fast_dev_run`` a folder of that name inside it, so that a trial never touches the
    results of a run.
    """
    if is_trial(trainer):
        # fast_dev_run replaces the loggers by one that answers every question with a function
        return Path(trainer.default_root_dir) / "fast_dev_run"
    folders = [logger.log_dir for logger in trainer.loggers if logger.log_dir is not None]
    return Path(folders[0] if folders else trainer.default_root_dir)


def is_trial(trainer: L.Trainer) -> bool:
    """Tell whether the trainer only tries out that everything runs."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]  # set outside its class
