"""Whether a checkpoint still has the bytes that were written.

A file of ``torch.save`` is a zip archive with a CRC-32 of each entry, which PyTorch writes and does
not look at when it reads. A folder gets a list of the same checksums, one of each file.
"""

from __future__ import annotations

import errno
import json
import logging
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil
import torch

from lrlhf.run.atomic import naming
from lrlhf.run.checkpoints.background_saves import Ranks

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
_kept: dict[Path, Mapping[Path, bytes]] = {}
"""What this rank has read of the folder that was verified last, if it was not read by itself."""


class NotACheckpointError(ValueError):
    """A path leads to no checkpoint, or to one that is damaged."""


def write_checksums(folder: Path, ranks: Ranks) -> None:
    """Write the list of a folder that was just filled; each rank measures what it wrote.

    The files are named after the ranks that wrote them.
    """
    names = sorted(path.name for path in folder.iterdir())
    own = [name for name in names if name.startswith(f"__{ranks.rank}_")]
    if ranks.rank == 0:
        own += [name for name in names if not name.startswith("__")]
    parts = ranks.all(lambda: {name: _measure(folder / name) for name in own})

    def write() -> None:
        files = {name: about for part in parts for name, about in sorted(part.items())}
        with naming(folder / CHECKSUMS_FILE):
            (folder / CHECKSUMS_FILE).write_text(json.dumps({"files": files}, indent=1) + "\n")

    ranks.on_zero(write)


def flaw_of(path: Path, *, index: int = 0, count: int = 1) -> str:
    """Say what is damaged in a checkpoint, in a few words; empty: nothing is.

    Of ``count`` shares of it the one at ``index`` is read; what was found whole is not read again.
    The share of a folder is what the rank of that index wrote, and is going to load if there are
    as many ranks as then: it stays in memory for `take_kept`.

    Raises:
        OSError: It is there and cannot be read now, which tells nothing of its bytes.
    """
    if not path.exists():
        target = f"a link to {path.readlink()}, which is " if path.is_symlink() else ""
        return f"it is {target}not there"
    if _stamp(path) in _whole:
        return ""
    _kept.clear()
    flaw = (_folder_flaw if path.is_dir() else _file_flaw)(path, index, count)
    if not flaw and count == 1:
        remember_whole(path)
    return flaw


def remember_whole(path: Path) -> None:
    """Take it from all ranks, each of which has read its share, that nothing is damaged."""
    _whole.add(_stamp(path))


def take_kept(folder: Path) -> Mapping[Path, bytes]:
    """Hand over the files of a folder that this rank read to verify them, for the only time."""
    return _kept.pop(folder.resolve(), {})


def _stamp(path: Path) -> tuple[tuple[Path, int, int], ...]:
    """What tells whether the files of a checkpoint are those of before."""
    place = path.resolve()
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    about = [(file, file.stat()) for file in files]
    return tuple((file, stat.st_size, stat.st_mtime_ns) for file, stat in about)


def _file_flaw(path: Path, index: int, count: int) -> str:
    with path.open("rb") as stream:
        start = stream.read(len(_ZIP_START))
    if start != _ZIP_START:
        kind = "a file of another kind, or its beginning was overwritten"
        return f"it is {kind}" if start else "it is empty"
    at = "list of parts"
    try:
        with zipfile.ZipFile(path) as archive:
            if not any(name.endswith("/data.pkl") for name in archive.namelist()):
                return "it is an archive of another kind"
            for entry in archive.infolist()[index::count]:
                at = f"part {entry.filename}"
                _read_through(archive, entry)
        at = "list of parts"  # which torch reads more strictly than zipfile does
        torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        return ""  # whole; that it holds what may not be loaded is said when it is loaded
    except OSError as error:
        if error.errno != errno.EINVAL:  # what a disk or network has to say is no damage
            raise
        return f"its {at} leads nowhere: {error}"  # a damaged offset
    except _UNREADABLE as error:
        if at.startswith("part"):
            return f"its {at} has other bytes than were written"
        if isinstance(error, zipfile.BadZipFile):
            return "it is cut short, or its end was overwritten"
        return f"its {at} cannot be read: {str(error).splitlines()[0]}"
    return ""


def _read_through(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Read a part to its end, where zipfile compares its checksum."""
    with archive.open(entry) as stream:
        while stream.read(_BLOCK):
            pass


def _folder_flaw(folder: Path, index: int, count: int) -> str:
    path = folder / CHECKSUMS_FILE
    if not path.is_file():
        if index == 0 and (folder / ".metadata").is_file():
            _logger.info("%s has no %s, so nothing tells whether it is whole", folder, path.name)
        return ""
    try:
        listed = json.loads(path.read_bytes())["files"].items()
        files = {name: (int(about["size"]), str(about["crc32"])) for name, about in listed}
        if outside := [name for name in files if Path(name).name != name]:
            raise ValueError(f"{outside[0]!r} is no name of a file")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {CHECKSUMS_FILE} cannot be read: {error}"
    own = {name: about for name, about in files.items() if _writer_of(name) % count == index}
    keep = count > 1 and _have_room(sum(size for size, _ in own.values()) * count)
    return _flaw_of_files(folder, own, keep=keep)


def _flaw_of_files(folder: Path, files: Mapping[str, tuple[int, str]], *, keep: bool) -> str:
    """Compare files of a folder with their sizes and checksums, and ``keep`` them in memory."""
    kept: dict[Path, bytes] = {}
    for name, (size, checksum) in sorted(files.items()):
        file = folder / name
        if not file.exists():
            return f"its {name} is not there"
        if (found := file.stat().st_size) != size:
            return f"its {name} has {found} bytes of {size}"
        if keep:
            content = kept[file.resolve()] = file.read_bytes()
            read = f"{zlib.crc32(content):08x}"
        else:
            read = _measure(file)["crc32"]
        if read != checksum:
            return f"its {name} has other bytes than were written"
    if kept:
        _kept[folder.resolve()] = kept
    return ""


def _writer_of(name: str) -> int:
    """Return the rank that wrote a file of a folder; rank zero has what is not split."""
    named = re.match(r"__(\d+)_", name)
    return int(named[1]) if named else 0


def _have_room(size: int) -> bool:
    """Tell whether main memory has room for so many bytes, half of what is free left alone."""
    return bool(size <= psutil.virtual_memory().available / 2)


def _measure(path: Path) -> dict[str, Any]:
    value = size = 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            value, size = zlib.crc32(block, value), size + len(block)
    return {"size": size, "crc32": f"{value:08x}"}
