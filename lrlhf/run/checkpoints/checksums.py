"""Whether a checkpoint still has the bytes that were written.

A file of ``torch.save`` is a zip archive with a CRC-32 of each entry, which PyTorch writes and does
not look at when it reads. A folder gets a list of the same checksums, one of each file.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import pickle
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from lightning.pytorch.strategies import Strategy

from lrlhf.run.atomic import naming

CHECKSUMS_FILE: Final = "checksums.json"
_BLOCK: Final = 1 << 20
_ZIP_START: Final = b"PK\x03\x04"
# what zipfile raises for an entry whose description is damaged
_UNREADABLE = (
    zipfile.BadZipFile,
    EOFError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    ValueError,
    struct.error,
    zlib.error,
)

_logger = logging.getLogger(__name__)
_whole: set[tuple[tuple[Path, int, int], ...]] = set()
"""Checkpoints that all ranks together have read to the end."""


class NotACheckpointError(ValueError):
    """A path leads to no checkpoint, or to one that is damaged."""


def write_checksums(folder: Path, strategy: Strategy | None, rank: int) -> None:
    """Write the list of a folder that was just filled; each rank measures what it wrote.

    Args:
        folder: Of a checkpoint, whose files are named after the ranks that wrote them.
        strategy: Of a run of several processes, all of which call; None: there is one.
        rank: Of this process.
    """
    own = [path for path in sorted(folder.iterdir()) if path.name.startswith(f"__{rank}_")]
    if rank == 0:
        own += [path for path in sorted(folder.iterdir()) if not path.name.startswith("__")]
    sums = {path.name: _measure(path) for path in own}
    parts = [sums]
    if strategy is not None:
        parts = [{} for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather_object(parts, sums)
    if rank == 0:
        files = {name: about for part in parts for name, about in sorted(part.items())}
        text = json.dumps({"files": files}, indent=1)
        with naming(folder / CHECKSUMS_FILE):
            (folder / CHECKSUMS_FILE).write_text(f"{text}\n")


def flaw_of(path: Path, *, index: int = 0, count: int = 1) -> str:
    """Say what is damaged in a checkpoint.

    Args:
        path: Of a file or folder.
        index: Which share of it to read.
        count: Shares in all.

    Returns:
        A few words, which name the damaged part; empty: nothing is.

    Raises:
        OSError: It is there and cannot be read now, which tells nothing of its bytes.
    """
    if path.is_dir():
        return "" if _stamp(path) in _whole else _folder_flaw(path, index, count)
    try:
        about = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            return f"it is a link to {path.readlink()}, which is not there"
        return "it is not there"
    if _stamp(path) in _whole:
        return ""
    return _file_flaw(path.resolve(), about.st_size, about.st_mtime_ns, index, count)


def remember_whole(path: Path) -> None:
    """Take it from all ranks, each of which has read its share, that nothing is damaged."""
    _whole.add(_stamp(path))


def _stamp(path: Path) -> tuple[tuple[Path, int, int], ...]:
    """What tells whether the files of a checkpoint are those of before."""
    place = path.resolve()
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    about = [(file, file.stat()) for file in files]
    return tuple((file, stat.st_size, stat.st_mtime_ns) for file, stat in about)


# once per process: what was chosen among several is not read a second time when it is loaded
@functools.lru_cache(maxsize=1024)
def _file_flaw(path: Path, size: int, modified: int, index: int, count: int) -> str:
    del modified
    if not size:
        return "it is empty"
    try:
        with path.open("rb") as stream:
            start = stream.read(len(_ZIP_START))
        if start != _ZIP_START:
            return "it is a file of another kind, or its beginning was overwritten"
        with zipfile.ZipFile(path) as archive:
            flaw = _archive_flaw(archive, archive.infolist()[index::count])
        return flaw or _list_flaw(path)
    except zipfile.BadZipFile:
        return "it is cut short, or its end was overwritten"
    except _UNREADABLE as error:
        return f"its list of parts cannot be read: {error}"
    except OSError as error:
        return f"its list of parts leads nowhere: {_only_if_damaged(error)}"


def _archive_flaw(archive: zipfile.ZipFile, entries: Sequence[zipfile.ZipInfo]) -> str:
    if not any(name.endswith("/data.pkl") for name in archive.namelist()):
        return "it is an archive of another kind"
    for entry in entries:
        try:
            with archive.open(entry) as stream:
                while stream.read(_BLOCK):
                    pass
        except _UNREADABLE:
            return f"its part {entry.filename} has other bytes than were written"
        except OSError as error:
            return f"its part {entry.filename} leads nowhere: {_only_if_damaged(error)}"
    return ""


def _only_if_damaged(error: OSError) -> str:
    """Pass on what a disk or network had to say; a damaged offset is an invalid argument."""
    if error.errno != errno.EINVAL:
        raise error
    return str(error)


def _list_flaw(path: Path) -> str:
    """Have torch look at the list of parts, which it reads more strictly than zipfile does."""
    try:
        torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except RuntimeError as error:
        return f"torch cannot read its list of parts: {str(error).splitlines()[0]}"
    except pickle.UnpicklingError:
        return ""  # whole; that it holds what may not be loaded is said when it is loaded
    return ""


def _folder_flaw(folder: Path, index: int, count: int) -> str:
    path = folder / CHECKSUMS_FILE
    if not path.is_file():
        if index == 0 and (folder / ".metadata").is_file():
            _logger.info("%s has no %s, so nothing tells whether it is whole", folder, path.name)
        return ""
    try:
        files = _listed(json.loads(path.read_bytes()))
    except (ValueError, KeyError, TypeError) as error:
        return f"its {CHECKSUMS_FILE} cannot be read: {error}"
    flaws = (_part_flaw(folder / name, files[name]) for name in sorted(files)[index::count])
    return next(filter(None, flaws), "")


def _listed(content: Any) -> dict[str, dict[str, Any]]:
    files: dict[str, dict[str, Any]] = {}
    for name, about in content["files"].items():
        if Path(name).name != name:
            raise ValueError(f"{name!r} is no name of a file")
        files[name] = {"size": int(about["size"]), "crc32": str(about["crc32"])}
    return files


def _part_flaw(path: Path, expected: dict[str, Any]) -> str:
    try:
        about = path.stat()
        if about.st_size != expected["size"]:
            return f"its {path.name} has {about.st_size} bytes of {expected['size']}"
        if _checksum(path, about.st_size, about.st_mtime_ns) != expected["crc32"]:
            return f"its {path.name} has other bytes than were written"
    except FileNotFoundError:
        return f"its {path.name} is not there"
    return ""


def _measure(path: Path) -> dict[str, Any]:
    about = path.stat()
    return {
        "size": about.st_size,
        "crc32": _checksum(path, about.st_size, about.st_mtime_ns),
    }


@functools.lru_cache(maxsize=4096)
def _checksum(path: Path, size: int, modified: int) -> str:
    del size, modified
    value = 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            value = zlib.crc32(block, value)
    return f"{value:08x}"
