"""A folder belongs to one run at a time, which a second one is told before it writes anything."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
import weakref
from pathlib import Path
from typing import IO, Final

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from lrlhf.run.atomic import naming
from lrlhf.run.lightning_internals import at_teardown
from lrlhf.run.locks import own
from lrlhf.run.run_folder import is_trial

LOCK_FILE: Final = ".lrlhf.lock"
_held: dict[Path, IO[bytes]] = {}
_of_trainer: weakref.WeakKeyDictionary[L.Trainer, list[Path]] = weakref.WeakKeyDictionary()


class FolderInUseError(ValueError):
    """Another run writes into a folder."""


def hold_folder(trainer: L.Trainer, folder: Path) -> None:
    """Have a run be the only one that writes into a folder, until it is torn down.

    Rank zero takes it for all. The system lets go of it when that process ends, however it ends.
    What has a protocol, or is only tried out (``fast_dev_run``), is not held.

    Args:
        trainer: Of the run; all ranks call.
        folder: Made if it is not there.

    Raises:
        FolderInUseError: Another run has it; on all ranks.
        OSError: It cannot be made or written; on all ranks.
    """
    if "://" in str(folder) or is_trial(trainer):
        return
    failure: Exception | None = None
    if trainer.is_global_zero:
        try:
            _hold(trainer, folder)
        except (FolderInUseError, OSError) as error:  # the others wait to be told
            failure = error
    failure = trainer.strategy.broadcast(failure)
    if failure is not None:
        raise failure


def is_held_by_another(folder: Path) -> bool:
    """Tell whether a run of another process writes into a folder at this moment."""
    path = _lock_file(folder)
    if path in _held:
        return False
    try:
        with path.open("r+b") as handle:
            return own(handle.fileno()) is False
    except FileNotFoundError:
        return False
    except OSError:  # not this user's to write, so neither is what lies there to be tidied
        return True


def _lock_file(folder: Path) -> Path:
    return folder.resolve() / LOCK_FILE


def _hold(trainer: L.Trainer, folder: Path) -> None:
    path = _lock_file(folder)
    if path in _held:
        return
    folder.mkdir(parents=True, exist_ok=True)
    _held[path] = _taken(folder, path)
    if trainer not in _of_trainer:
        _of_trainer[trainer] = []
        at_teardown(trainer, functools.partial(_release, trainer))
    _of_trainer[trainer].append(path)


def _taken(folder: Path, path: Path) -> IO[bytes]:
    while True:
        # read and write, as whoever comes second reads who is first
        handle = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        free = own(handle.fileno())
        if free is False:
            with handle:
                owner = handle.read().decode(errors="replace").strip()
            raise FolderInUseError(
                f"{folder} belongs to a run that goes on ({owner or 'it has just begun'}), and two "
                "would overwrite each other's files: end that one, or give this one a folder of "
                "its own"
            )
        if os.fstat(handle.fileno()).st_nlink:
            break
        handle.close()  # the run before removed it in this moment
    if free is None:
        rank_zero_warn(
            f"the file system of {folder} has no locks, so nothing keeps a second run from "
            "writing there: see to it that there is none"
        )
    with contextlib.suppress(OSError):  # others of a shared folder may take it after a kill
        os.fchmod(handle.fileno(), 0o666)
    with naming(path):
        handle.truncate()
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        handle.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
        handle.flush()
    return handle


def _release(trainer: L.Trainer) -> None:
    for path in _of_trainer.pop(trainer, []):
        with contextlib.suppress(OSError), _held.pop(path):
            path.unlink(missing_ok=True)  # as long as it is ours
