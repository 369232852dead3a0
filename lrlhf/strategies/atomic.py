"""How a file or folder appears under its name: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from safetensors import SafetensorError


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have errors say which file was written: the system names none when a disk is full.

    Raises:
        OSError: As it was, with ``path`` where it named no file.
    """
    try:
        yield
    except SafetensorError as error:  # all that safetensors knows of a full disk
        raise OSError(f"{path} cannot be written: {error}") from error
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


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
    remove(temporary)
    try:
        with naming(path), temporary.open("wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        _take_name(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Hand out an empty folder that takes the place of ``path`` when the block ends well.

    A folder cannot replace another in one step, so an old one is moved aside first and removed
    last; after a crash between the two, the next call moves it back.
    """
    recover_folder(path)
    fresh = path.with_name(f".{path.name}.tmp")
    open_folder(fresh)
    try:
        with naming(path):
            yield fresh
        place_folder(fresh, path)
    finally:
        recover_folder(path)
        shutil.rmtree(fresh, ignore_errors=True)


def atomic_link(path: Path, target: Path) -> None:
    """Have ``path`` lead to ``target``, in the place of what had the name.

    The link is relative, so that both can be moved together. Where links are refused, as on some
    file systems, ``path`` becomes a copy.
    """
    fresh = path.with_name(f".{path.name}.tmp")
    remove(fresh)
    try:
        fresh.symlink_to(os.path.relpath(target, path.parent))
    except (OSError, NotImplementedError):
        _copy(target, path)
        return
    _take_name(fresh, path)
    _sync_folder(path.parent)


def _copy(source: Path, path: Path) -> None:
    if source.is_dir():
        with atomic_folder(path) as folder:
            shutil.copytree(source, folder, dirs_exist_ok=True)
        return
    with atomic_write(path) as handle, source.open("rb") as stream:
        shutil.copyfileobj(stream, handle)


def open_folder(fresh: Path) -> None:
    """Make an empty folder, in the place of what a crash may have left there."""
    remove(fresh)
    fresh.mkdir(parents=True)


def place_folder(fresh: Path, path: Path) -> None:
    """Give a finished folder its name, in the place of what had it."""
    _sync_tree(fresh)
    _take_name(fresh, path)
    _sync_folder(path.parent)


def recover_folder(path: Path) -> None:
    """Leave ``path`` in place, and nothing beside it, whatever a crash in `atomic_folder` left.

    Several processes may do so at the same time.
    """
    old = _aside(path)
    if path.exists():
        remove(old)
        return
    if path.is_symlink() and os.path.lexists(old):
        path.unlink(missing_ok=True)  # it leads nowhere, and no folder can take its place
    with contextlib.suppress(FileNotFoundError):
        old.rename(path)


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if _is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _take_name(fresh: Path, path: Path) -> None:
    """Rename what is finished to ``path``, whatever is there."""
    if os.path.lexists(path) and (_is_folder(fresh) or _is_folder(path)):
        # only a file or link can replace another in one step
        recover_folder(path)
        path.rename(_aside(path))
        try:
            fresh.rename(path)
        finally:
            recover_folder(path)
    else:
        fresh.replace(path)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


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
