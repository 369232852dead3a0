"""Reads checkpoints: folders tensor by tensor, as far as they are asked for, and files."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import pickle
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import psutil
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.tensor import DTensor

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
_intact: set[tuple[tuple[Path, int, int], ...]] = set()
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
    as many ranks as then: it stays in memory for `pop_verified_files`.

    Raises:
        OSError: It is there and cannot be read now, which tells nothing of its bytes.
    """
    if not path.exists():
        target = f"a link to {path.readlink()}, which is " if path.is_symlink() else ""
        return f"it is {target}not there"
    if _stamp(path) in _intact:
        return ""
    _kept.clear()
    flaw = (_folder_flaw if path.is_dir() else _file_flaw)(path, index, count)
    if not flaw and count == 1:
        mark_intact(path)
    return flaw


def mark_intact(path: Path) -> None:
    """Take it from all ranks, each of which has read its share, that nothing is damaged."""
    _intact.add(_stamp(path))


def pop_verified_files(folder: Path) -> Mapping[Path, bytes]:
    """Hand over the files of a folder that this rank read to verify them, for the only time."""
    return _kept.pop(folder.resolve(), {})


def _stamp(path: Path) -> tuple[tuple[Path, int, int], ...]:
    """What tells whether the files of a checkpoint are those of before."""
    resolved = path.resolve()
    files = sorted(resolved.iterdir()) if resolved.is_dir() else [resolved]
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
                _verify_checksum(archive, entry)
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


def _verify_checksum(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
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
    own = {name: about for name, about in files.items() if _rank_of_file(name) % count == index}
    # half of what is free is left alone
    size = sum(size for size, _ in own.values())
    keep = count > 1 and size * count <= psutil.virtual_memory().available / 2
    return _flaw_of_files(folder, own, keep=keep)


def _flaw_of_files(folder: Path, files: Mapping[str, tuple[int, str]], *, keep: bool) -> str:
    """Compare files of a folder with their sizes and checksums, and ``keep`` them in memory."""
    contents: dict[Path, bytes] = {}
    for name, (size, checksum) in sorted(files.items()):
        file = folder / name
        if not file.exists():
            return f"its {name} is not there"
        if (actual := file.stat().st_size) != size:
            return f"its {name} has {actual} bytes of {size}"
        if keep:
            content = contents[file.resolve()] = file.read_bytes()
            read = f"{zlib.crc32(content):08x}"
        else:
            read = _measure(file)["crc32"]
        if read != checksum:
            return f"its {name} has other bytes than were written"
    if contents:
        _kept[folder.resolve()] = contents
    return ""


def _rank_of_file(name: str) -> int:
    """Return the rank that wrote a file of a folder; rank zero has what is not split."""
    named = re.match(r"__(\d+)_", name)
    return int(named[1]) if named else 0


def _measure(path: Path) -> dict[str, Any]:
    value = size = 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            value, size = zlib.crc32(block, value), size + len(block)
    return {"size": size, "crc32": f"{value:08x}"}


META_FILE = "meta.pt"
TENSOR_MARK = "__tensor__"


def is_folder_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path is a checkpoint of this kind."""
    return (Path(path) / META_FILE).is_file()


class StoredTensors(Mapping[str, Tensor]):
    """Tensors of a folder, each read when it is asked for; ``keys`` are theirs by their names."""

    def __init__(self, reader: FolderReader, keys: Mapping[str, str]) -> None:
        self._reader = reader
        self._keys = dict(keys)

    def __getitem__(self, name: str) -> Tensor:
        key = self._keys[name]
        return _read(self._reader, [key])[key]

    def read_like(self, name: str, weight: DTensor) -> DTensor | None:
        """See `lrlhf.models.sharding.ReadsShards`."""
        key = self._keys[name]
        about = _described(self._reader, key)
        if about.size != weight.shape:
            return None
        part = torch.empty_like(weight, dtype=about.properties.dtype, requires_grad=False)
        _fill(self._reader, {key: part})
        return part  # type: ignore[return-value]  # what is like a DTensor is one

    def __contains__(self, name: object) -> bool:
        return name in self._keys  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def read_folder(folder: Path, *, lazy: bool) -> dict[str, Any]:
    """Read a checkpoint that `save_folder` wrote, as Lightning wants to have it.

    ``lazy`` leaves dictionaries of tensors unread, as `StoredTensors`.

    Raises:
        NotACheckpointError: Something else is there, or it is damaged.
    """
    if not is_folder_checkpoint(folder):
        raise NotACheckpointError(f"{folder} is no checkpoint: it has no {META_FILE}")
    with explained(folder / META_FILE):
        marked = torch.load(folder / META_FILE, map_location="cpu", weights_only=True)
    if not isinstance(marked, dict):
        raise NotACheckpointError(
            f"{folder} is no checkpoint: its {META_FILE} holds something else"
        )
    tensors = None
    reader = FolderReader(folder, pop_verified_files(folder))
    if not lazy:
        tensors = _read(reader, list(reader.read_metadata().state_dict_metadata))
    return {name: _put_back(part, reader, tensors) for name, part in marked.items()}


def _put_back(value: Any, reader: FolderReader, tensors: Mapping[str, Tensor] | None) -> Any:
    """Put tensors, read already or to be read, in the place of their marks."""
    if isinstance(value, dict):
        if TENSOR_MARK in value:
            key = value[TENSOR_MARK]
            if tensors is not None and key not in tensors:
                raise NotACheckpointError(f"{reader.path} is damaged: it does not have {key}")
            return StoredTensors(reader, {"": key})[""] if tensors is None else tensors[key]
        marked = [isinstance(part, dict) and TENSOR_MARK in part for part in value.values()]
        if tensors is None and marked and all(marked):
            return StoredTensors(reader, {name: part[TENSOR_MARK] for name, part in value.items()})
        return {name: _put_back(part, reader, tensors) for name, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [_put_back(part, reader, tensors) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


class FolderReader(FileSystemReader):
    """Reads a folder's list of tensors once, and nothing in it that could run code.

    ``kept`` are files of it that are in memory, and are not read again.
    """

    def __init__(self, folder: Path, contents: Mapping[Path, bytes] = MappingProxyType({})) -> None:
        super().__init__(folder)
        self.fs = _PartlyInMemory(contents)
        self._folder = folder
        self._list: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        del args, kwargs
        if self._list is None:
            path = self._folder / ".metadata"
            with explained(path), path.open("rb") as stream:
                metadata = _ListUnpickler(stream).load()
            if not isinstance(metadata, Metadata):
                raise NotACheckpointError(f"{self._folder}/.metadata is no list of tensors")
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            self._list = metadata
        return self._list


class _PartlyInMemory(FileSystem):
    def __init__(self, contents: Mapping[Path, bytes]) -> None:
        self._kept = {os.fspath(path): content for path, content in contents.items()}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if (content := self._kept.get(os.path.realpath(path))) is not None:
            yield io.BytesIO(content)  # shares the bytes
            return
        with super().create_stream(path, mode) as stream:
            yield stream


# what PyTorch's list of tensors is made of, which it pickles; no part of it runs anything
_LISTED: dict[str, set[str]] = {
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(name for name, kind in vars(torch).items() if type(kind) is torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
}


class _ListUnpickler(pickle.Unpickler):
    """Lets through only the names of which PyTorch's list consists."""

    def find_class(self, module: str, name: str) -> Any:
        # exact names: "os.system" would be found in any module that imports os
        if name in _LISTED.get(module.replace("pathlib._local", "pathlib"), ()):
            return super().find_class(module, name)
        raise NotACheckpointError(
            f"a checkpoint's list of tensors names {module}.{name}, which no such list contains: "
            "it is damaged, or was made to run code"
        )


def _read(reader: FolderReader, keys: list[str]) -> dict[str, Tensor]:
    """Read whole tensors, without asking the other ranks."""
    described = {key: _described(reader, key) for key in keys}
    targets = {
        key: torch.empty(about.size, dtype=about.properties.dtype)
        for key, about in described.items()
    }
    _fill(reader, targets)
    return targets


def _described(reader: FolderReader, key: str) -> TensorStorageMetadata:
    about = reader.read_metadata().state_dict_metadata.get(key)
    if not isinstance(about, TensorStorageMetadata):
        raise NotACheckpointError(f"{reader.path} is damaged: it does not have {key}")
    return about


def _fill(reader: FolderReader, targets: Mapping[str, Tensor]) -> None:
    with explained(Path(reader.path)), without_remarks():
        load_distributed(dict(targets), storage_reader=reader, no_dist=True)


@contextlib.contextmanager
def without_remarks() -> Iterator[None]:
    """Leave out what PyTorch wraps around: a remark on single processes, and all exceptions."""
    with warnings.catch_warnings(), unwrapped():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """Raise what an exception of PyTorch's checkpoints, itself no ``Exception``, wraps.

    That may be an interrupt.
    """
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Say which checkpoint it is that cannot be read."""
    try:
        yield
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        reason = (str(error) or "it is cut short").splitlines()[0]
        raise NotACheckpointError(f"{path} cannot be read as a checkpoint: {reason}") from error


def read_checkpoint(path: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """Read a checkpoint of any kind, its tensors when they are asked for.

    ``weights_only`` refuses to run code that comes with a file.

    Raises:
        NotACheckpointError: Something else is there, or nothing.
    """
    if is_folder_checkpoint(path):
        return read_folder(path, lazy=True)
    if not path.is_file():
        what = "a folder without meta.pt" if path.is_dir() else "not there"
        raise NotACheckpointError(f"{path} is no checkpoint: it is {what}")
    with explained(path):
        loaded = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
    if not isinstance(loaded, dict) or "state_dict" not in loaded:
        raise NotACheckpointError(f"{path} is no checkpoint: it has no state_dict")
    return loaded
