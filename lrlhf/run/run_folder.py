"""The folder that belongs to a run."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

import lightning as L


@runtime_checkable
class HasRunFolder(Protocol):
    """A trainer with one folder for everything, whatever its loggers have."""

    @property
    def run_folder(self) -> Path:
        """The folder."""


@runtime_checkable
class WritesToRunFolder(Protocol):
    """A logger that takes the run folder where it was given none."""

    def use_run_folder(self, folder: Path | str) -> None:
        """Write there, unless a folder was given."""


def run_folder(trainer: L.Trainer) -> Path:
    """Return the folder that everything goes to which is given none.

    That of `lrlhf.Trainer` is its ``default_root_dir``. With Lightning's trainer it is the folder
    of the first logger that has one of its own, else ``default_root_dir``. Under ``fast_dev_run``
    it is a folder of that name inside, so that a trial never touches the results of a run.
    """
    if is_trial(trainer):
        # fast_dev_run replaces the loggers by one that answers every question with a function
        return Path(trainer.default_root_dir) / "fast_dev_run"
    if isinstance(trainer, HasRunFolder):
        return trainer.run_folder
    folders = [logger.log_dir for logger in trainer.loggers if logger.log_dir is not None]
    return Path(folders[0] if folders else trainer.default_root_dir)


def refuse_remote(folder: Path | str) -> None:
    """Refuse a run folder that this machine would take for one of its own, such as ``./s3:``.

    Raises:
        ValueError: It is an address; says what to do instead.
    """
    if "://" in str(folder):
        raise ValueError(
            f"{folder} is no folder of this machine; give a local trainer.default_root_dir, and "
            "RLCheckpoint a remote dirpath to keep checkpoints elsewhere"
        )


def is_trial(trainer: L.Trainer) -> bool:
    """Tell whether the trainer only tries out that everything runs."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]  # set outside its class
