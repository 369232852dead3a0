"""How a file or folder appears under its name: whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from safetensors import SafetensorError

if TYPE_CHECKING:
    from torch import Tensor

TEMPORARY: Final = "tmp"
HELD: Final = (errno.EACCES, errno.EAGAIN)
"""What the system says where another process has a lock; all else: there are no locks."""


@contextlib.contextmanager
def naming(path: Path, fresh: Path | None = None) -> Iterator[None]:
    """Have errors say which file could not be written: the system names none when a disk is full.

    Torch reports a write that failed as an error of its own making, from which only the context
    leads to what the system said. The ``OSError`` names ``path`` where the system named no file, or
    ``fresh``: the temporary name, which means nothing to anybody else.
    """
    handled = sys.exception()
    try:
        yield
    except SafetensorError as error:  # all that safetensors knows of a full disk
        raise OSError(f"{path} cannot be written: {error}") from error
    except RuntimeError as error:
        if (cause := _system_error(error, handled)) is None:
            raise
        raise _named(cause, path, fresh) from error
    except OSError as error:
        if error.errno is None or (named := _named(error, path, fresh)).filename == error.filename:
            raise
        raise named from error


def _system_error(error: BaseException, handled: BaseException | None) -> OSError | None:
    """Find what the system said while an error came about; ``handled`` was there before."""
    origin = error.__context__
    while origin is not None and origin is not handled:
        if isinstance(origin, OSError) and origin.errno is not None:
            return origin
        origin = origin.__context__
    return None


def _named(error: OSError, path: Path, fresh: Path | None) -> OSError:
    name = str(path) if error.filename is None else os.fsdecode(error.filename)
    if fresh is not None and Path(name).is_relative_to(fresh):
        name = str(path / Path(name).relative_to(fresh))
    assert error.errno is not None
    return OSError(error.errno, os.strerror(error.errno), name)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of ``path`` when the block ends well.

    The data go to a hidden file in the same folder, whose name no other process has, reach the
    disk, then take the name in one step: whoever reads ``path`` sees the old content or the new
    one, also after a crash. If the block raises, ``path`` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_unclaimed(path.parent, path.name, TEMPORARY)
    temporary, handle = _open_temporary(path)
    try:
        with naming(path, temporary), handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
            _take_name(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


@contextlib.contextmanager
def atomic_folder(path: Path, ending: str = TEMPORARY) -> Iterator[Path]:
    """Hand out an empty folder that takes the place of ``path`` when the block ends well.

    Its name has the ``ending`` until then.

    A folder cannot replace another in one step, so an old one is moved aside first and removed
    last; after a crash between the two, the next call moves it back.
    """
    recover_folder(path)
    remove_unclaimed(path.parent, path.name, ending)
    try:
        with temporary_folder(path, ending) as fresh:
            yield fresh
            place_folder(fresh, path)
    finally:
        recover_folder(path)


@contextlib.contextmanager
def temporary_folder(path: Path, ending: str = TEMPORARY) -> Iterator[Path]:
    """Hand out an empty folder beside ``path``, which is removed when it has not been renamed."""
    fresh, descriptor = _make_temporary(path, ending)
    try:
        with naming(path, fresh):
            yield fresh
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        os.close(descriptor)


def atomic_link(path: Path, target: Path) -> None:
    """Have ``path`` lead to ``target``, in the place of what had the name.

    The link is relative, so that both can be moved together. Where links are refused, as on some
    file systems, ``path`` becomes a copy.
    """
    remove_unclaimed(path.parent, path.name, TEMPORARY)
    fresh = _hidden_name(path, TEMPORARY)
    try:
        fresh.symlink_to(os.path.relpath(target, path.parent))
    except (OSError, NotImplementedError):
        if target.is_dir():
            with atomic_folder(path) as folder:
                shutil.copytree(target, folder, dirs_exist_ok=True)
        else:
            with atomic_write(path) as handle, target.open("rb") as stream:
                shutil.copyfileobj(stream, handle)
        return
    _take_name(fresh, path)
    _sync_folder(path.parent)


def remove_unclaimed(folder: Path, name: str, ending: str) -> None:
    """Remove what has a temporary name and no living owner.

    Where the file system has no locks, nothing tells who lives, and all of it goes. ``name`` is
    what would have been taken, or what it ends with behind a dot, such as ``ckpt``; empty: any.
    """
    if not folder.is_dir():
        return
    # a pattern of every checkpoint's name would be compiled and kept; older versions had no token
    end = f".{name}.{ending}" if name else f".{ending}"
    for left in [entry for entry in folder.iterdir() if entry.name.endswith(end)]:
        if left.name.startswith(".") and not _is_claimed(left):
            remove(left)


def _claim(descriptor: int) -> bool:
    """Have others see that what is open is being written; False: somebody else has claimed it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in HELD
    return True


def _is_claimed(path: Path) -> bool:
    """Tell whether a living process has claimed a file or folder; a link has no owner."""
    if path.is_symlink():
        return False
    try:
        # network file systems lock only what may be written, which a folder cannot be
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    except FileNotFoundError:
        return False
    except PermissionError:  # another user's, and theirs to remove
        return True
    try:
        return not _claim(descriptor)
    finally:
        os.close(descriptor)


def _hidden_name(path: Path, ending: str) -> Path:
    """Choose a name beside ``path`` that no other process has."""
    return path.with_name(f".{secrets.token_hex(4)}.{path.name}.{ending}")


def _open_temporary(path: Path) -> tuple[Path, IO[bytes]]:
    while True:
        fresh = _hidden_name(path, TEMPORARY)
        with naming(path, fresh):
            handle = fresh.open("wb")
        # else another process took it for a leftover before it was claimed
        if _claim(handle.fileno()) and fresh.exists():
            return fresh, handle
        handle.close()


def _make_temporary(path: Path, ending: str) -> tuple[Path, int]:
    while True:
        fresh = _hidden_name(path, ending)
        with naming(path, fresh):
            fresh.mkdir(parents=True)
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(fresh, os.O_RDONLY)
            if _claim(descriptor) and fresh.exists():
                return fresh, descriptor
            os.close(descriptor)


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


def check_room(path: Path, content: Any, what: str = "a checkpoint") -> None:
    """Raise `OSError` where the disk has less room than the tensors of ``content`` take.

    They count whole ones as split ones, each once; ``path`` need not exist.
    """
    unique = {id(tensor): tensor for tensor in _tensors(content)}
    needed = sum(tensor.numel() * tensor.element_size() for tensor in unique.values())
    absolute = path.absolute()
    free = shutil.disk_usage(next(p for p in (absolute, *absolute.parents) if p.exists())).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: {what} takes at least {needed / 1e9:.3g} GB, and "
            f"{free / 1e9:.3g} GB are free: make room, or set another dirpath",
            str(path),
        )


def _tensors(content: Any) -> Iterator[Tensor]:
    from torch import Tensor  # noqa: PLC0415  what only writes pages does without torch

    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, Mapping | list | tuple):
        for value in content.values() if isinstance(content, Mapping) else content:
            yield from _tensors(value)
