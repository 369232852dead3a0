"""The folder that belongs to a run."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import socket
import time
from pathlib import Path
from typing import IO, Final, Protocol, runtime_checkable

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from lrlhf.run.atomic import HELD, naming
from lrlhf.run.collectives import from_rank_zero
from lrlhf.run.lightning_internals import at_teardown


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


LOCK_FILE: Final = ".lrlhf.lock"
FOLDER_WAIT: Final = "LRLHF_FOLDER_WAIT"
"""Environment variable: seconds to wait for a folder that another run has; none by default. A file
server may keep the lock of a machine that was lost for a minute or two."""
_LOOK_SECONDS = 1.0
_logger = logging.getLogger(__name__)
_held: dict[Path, IO[bytes]] = {}


class FolderInUseError(ValueError):
    """Another run writes into a folder."""


def hold_folder(trainer: L.Trainer, folder: Path) -> None:
    """Have a run be the only one that writes into a folder, until it is torn down.

    Rank zero takes it for all. The system lets go of it when that process ends, however it ends.
    What has a protocol, or is only tried out (``fast_dev_run``), is not held. All ranks call.

    Raises:
        FolderInUseError: Another run has it; on all ranks.
        OSError: It cannot be made or written; on all ranks.
    """
    if "://" in str(folder) or is_trial(trainer):
        return
    from_rank_zero(trainer.strategy, lambda: _hold(trainer, folder))


def is_held_by_another(folder: Path) -> bool:
    """Tell whether a run of another process writes into a folder at this moment."""
    path = _lock_file(folder)
    if path in _held:
        return False
    try:
        with path.open("r+b") as handle:
            return _own(handle.fileno()) is False
    except FileNotFoundError:
        return False
    except OSError:  # not this user's to write, so neither is what lies there to be tidied
        return True


def _lock_file(folder: Path) -> Path:
    return folder.resolve() / LOCK_FILE


def _hold(trainer: L.Trainer, folder: Path) -> None:
    path = _lock_file(folder)
    if path not in _held:
        folder.mkdir(parents=True, exist_ok=True)
        handle = _held[path] = _taken(folder, path)
        at_teardown(trainer, functools.partial(_release, path, handle))


def _taken(folder: Path, path: Path) -> IO[bytes]:
    deadline = time.monotonic() + float(os.environ.get(FOLDER_WAIT, "0"))
    waits = False
    while True:
        # read and write, as whoever comes second reads who is first
        handle = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        free = _own(handle.fileno())
        if free is False:
            with handle:
                owner = handle.read().decode(errors="replace").strip()
            if time.monotonic() < deadline:
                if not waits:
                    _logger.info("%s is held (%s): waiting for it", folder, owner)
                waits = True
                time.sleep(_LOOK_SECONDS)
                continue
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


def _own(descriptor: int) -> bool | None:
    """Take an open file for this process, and for none that it forks, until it is closed.

    False: another process has it. None: the file system has no such locks.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in HELD else None
    return True


def _release(path: Path, handle: IO[bytes]) -> None:
    # a trainer is torn down again after whatever it does, when another one may have the folder
    if _held.get(path) is handle:
        with contextlib.suppress(OSError), _held.pop(path):
            path.unlink(missing_ok=True)  # as long as it is ours
