"""Where callbacks write, and how a file or folder appears there: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import lightning as L


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


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of ``path`` when the block ends well.

    The data go to a hidden file in the same folder, reach the disk, then take the name in one
    step: whoever reads ``path`` sees the old content or the new one, also after a crash. If the
    block raises, ``path`` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # one name per target: what a killed process left behind is overwritten by the next attempt
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Hand out an empty folder that takes the place of ``path`` when the block ends well.

    A folder cannot replace another in one step, so an old one is moved aside first and removed
    last; after a crash between the two, the next call moves it back.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.old")
    _recover(path, old)
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        yield fresh
        _sync_tree(fresh)
        if path.exists():
            path.rename(old)
        fresh.rename(path)
    finally:
        _recover(path, old)
        shutil.rmtree(fresh, ignore_errors=True)
    _sync_folder(path.parent)


def _recover(path: Path, old: Path) -> None:
    """Leave ``path`` in place and no ``old``, whichever of the two a crash left."""
    if not old.exists():
        return
    if path.exists():
        shutil.rmtree(old)
    else:
        old.rename(path)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as handle:
                os.fsync(handle.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    # a rename is only on the disk once the folder that lists the name is
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
