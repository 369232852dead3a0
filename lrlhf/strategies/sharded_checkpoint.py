"""Checkpoints as folders that all ranks write to at once.

A folder holds every tensor of the checkpoint under a key of its own, as PyTorch's distributed
checkpoints do, and ``meta.pt`` with everything else. A key stands for a whole tensor, however it is
split, so any number of processes and any strategy can read it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.tensor import DTensor

from lrlhf.strategies.atomic import (
    atomic_folder,
    atomic_write,
    open_folder,
    place_folder,
    recover_folder,
)

META_FILE = "meta.pt"
_TENSOR = "__tensor__"


class NotACheckpointError(ValueError):
    """A path leads to no checkpoint."""


class UnusableCheckpointError(RuntimeError):
    """What was to become a checkpoint could not be read again; the one before it is kept."""


def is_folder_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path is a checkpoint of this kind."""
    return (Path(path) / META_FILE).is_file()


class StoredTensors(Mapping[str, Tensor]):
    """Tensors of a folder, each read when it is asked for.

    Args:
        folder: The checkpoint.
        keys: Key in the folder of each tensor's name.
    """

    def __init__(self, folder: Path, keys: Mapping[str, str]) -> None:
        self._reader = _Reader(folder)
        self._keys = dict(keys)

    def __getitem__(self, name: str) -> Tensor:
        key = self._keys[name]
        return _read(self._reader, [key])[key]

    def read_like(self, name: str, weight: DTensor) -> DTensor | None:
        """See `lrlhf.models.sharding.ReadsParts`."""
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


@dataclass
class _Taken:
    """A checkpoint's tensors by key, taken out of it."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    _keys: dict[int, str] = field(default_factory=dict)

    def take(self, value: Any, key: str) -> Any:
        """Return ``value`` with marks in the place of its tensors."""
        if isinstance(value, Tensor):
            if id(value) in self._keys:  # tied weights are one tensor with several names
                return {_TENSOR: self._keys[id(value)]}
            while key in self.tensors:  # {"a": {"b": …}, "a/b": …}, or {0: …, "0": …}
                key += "'"
            self.tensors[key] = value.detach()
            self._keys[id(value)] = key
            return {_TENSOR: key}
        if isinstance(value, Mapping):
            if _TENSOR in value:
                raise ValueError(
                    f"{key or 'the checkpoint'} has an entry {_TENSOR!r}, which stands for a "
                    "tensor in a checkpoint's folder; rename it"
                )
            return {name: self.take(part, f"{key}/{name}") for name, part in value.items()}
        if isinstance(value, list | tuple):
            parts = [self.take(part, f"{key}/{index}") for index, part in enumerate(value)]
            return parts if isinstance(value, list) else tuple(parts)
        return value


def save_folder(checkpoint: Mapping[str, Any], folder: Path, strategy: Strategy | None) -> None:
    """Write a checkpoint into an empty folder.

    Args:
        checkpoint: What Lightning wants to save; all ranks have the same structure, but only the
            tensors that rank zero lacks are taken from others. A tensor is a `DTensor`, whole, or
            on the meta device where another rank has it.
        folder: Exists on all ranks.
        strategy: Of the run; None: there is one process and no run.

    Raises:
        ValueError: A tensor is on the meta device everywhere, or a name has another use.
    """
    taken = _Taken()
    rest = taken.take(dict(checkpoint), "")
    several = strategy is not None and torch.distributed.is_initialized()
    tensors = {
        key: tensor if isinstance(tensor, DTensor) else tensor.cpu()
        for key, tensor in taken.tensors.items()
        if isinstance(tensor, DTensor) or not tensor.is_meta
    }
    on_ranks = _on_all_ranks(set(tensors)) if several else [set(tensors)]
    if strategy is not None and several:
        held = strategy.broadcast({key for key, t in tensors.items() if not isinstance(t, DTensor)})
        known = strategy.broadcast(set(taken.tensors))
        if not strategy.is_global_zero:
            # what rank zero has whole, it writes
            tensors = {k: t for k, t in tensors.items() if k in known and k not in held}
    else:
        known = set(taken.tensors)
    if missing := sorted(known.difference(*on_ranks)):
        raise ValueError(f"no rank holds {missing[0]} ({len(missing)} such tensors)")
    with _alone():
        save_distributed(tensors, storage_writer=FileSystemWriter(folder), no_dist=not several)
    if strategy is None or strategy.is_global_zero:
        torch.save(rest, folder / META_FILE)


def _flaw(folder: Path) -> str:
    """Say why a folder that was just written could not be read; empty: it can."""
    try:
        torch.load(folder / META_FILE, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        return f"a callback or module saves something that only code could restore: {error}"
    parts = _Reader(folder).read_metadata().storage_data or {}
    missing = {part.relative_path for part in parts.values()}
    missing = {name for name in missing if not (folder / name).is_file()}
    if missing:
        return (
            f"{sorted(missing)[0]}, which another process wrote, is not there: all processes must "
            "see the same folder; set dirpath of RLCheckpoint to one on a shared disk"
        )
    return ""


def _on_all_ranks(own: set[str]) -> list[set[str]]:
    found: list[set[str]] = [set()] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, own)
    return found


def read_folder(folder: Path, *, lazy: bool) -> dict[str, Any]:
    """Read a checkpoint, as Lightning wants to have it.

    Args:
        folder: Written by `save_folder`.
        lazy: Leave dictionaries of tensors unread, as `StoredTensors`.

    Raises:
        NotACheckpointError: Something else is there, or it is damaged.
    """
    if not is_folder_checkpoint(folder):
        raise NotACheckpointError(f"{folder} is no checkpoint: it has no {META_FILE}")
    with _explained(folder / META_FILE):
        rest = torch.load(folder / META_FILE, map_location="cpu", weights_only=True)
    if not isinstance(rest, dict):
        raise NotACheckpointError(
            f"{folder} is no checkpoint: its {META_FILE} holds something else"
        )
    tensors = None
    if not lazy:
        reader = _Reader(folder)
        tensors = _read(reader, list(reader.read_metadata().state_dict_metadata))
    return {name: _put_back(part, folder, tensors) for name, part in rest.items()}


def _put_back(value: Any, folder: Path, tensors: Mapping[str, Tensor] | None) -> Any:
    """Put tensors, read already or to be read, in the place of their marks."""
    if isinstance(value, dict):
        if _TENSOR in value:
            key = value[_TENSOR]
            if tensors is not None and key not in tensors:
                raise NotACheckpointError(f"{folder} is damaged: it does not have {key}")
            return StoredTensors(folder, {"": key})[""] if tensors is None else tensors[key]
        marks = {
            name: part[_TENSOR]
            for name, part in value.items()
            if isinstance(part, dict) and _TENSOR in part
        }
        if tensors is None and marks and len(marks) == len(value):
            return StoredTensors(folder, marks)
        return {name: _put_back(part, folder, tensors) for name, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [_put_back(part, folder, tensors) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


class _Reader(FileSystemReader):
    """Reads a folder's list of tensors once, and nothing in it that could run code."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self._list: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        del args, kwargs
        if self._list is None:
            path = self._folder / ".metadata"
            with _explained(path), path.open("rb") as stream:
                found = _ListUnpickler(stream).load()
            if not isinstance(found, Metadata):
                raise NotACheckpointError(f"{self._folder}/.metadata is no list of tensors")
            found.storage_meta = found.storage_meta or StorageMeta()
            self._list = found
        return self._list


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


def _read(reader: _Reader, keys: list[str]) -> dict[str, Tensor]:
    """Read whole tensors, without asking the other ranks."""
    described = {key: _described(reader, key) for key in keys}
    targets = {
        key: torch.empty(about.size, dtype=about.properties.dtype)
        for key, about in described.items()
    }
    _fill(reader, targets)
    return targets


def _described(reader: _Reader, key: str) -> TensorStorageMetadata:
    about = reader.read_metadata().state_dict_metadata.get(key)
    if not isinstance(about, TensorStorageMetadata):
        raise NotACheckpointError(f"{reader.path} is damaged: it does not have {key}")
    return about


def _fill(reader: _Reader, targets: Mapping[str, Tensor]) -> None:
    with _explained(Path(reader.path)), _alone():
        load_distributed(dict(targets), storage_reader=reader, no_dist=True)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Leave out what PyTorch wraps around: a remark on single processes, and all exceptions."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            # itself no Exception; what it wraps may be an interrupt
            raise next(iter(error.failures.values()))[0] from error


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Say which checkpoint it is that cannot be read."""
    try:
        yield
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        reason = (str(error) or "it is cut short").splitlines()[0]
        raise NotACheckpointError(f"{path} cannot be read as a checkpoint: {reason}") from error


class FolderCheckpoints(Strategy):
    """The part of a strategy that writes checkpoints from all ranks, and reads them."""

    checkpoint: Literal["sharded", "full"]

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        """Write a folder, or with ``checkpoint: full`` a file, that appears when it is whole."""
        if storage_options is not None:
            raise TypeError("sharded checkpoints take no storage_options")
        if "://" in os.fspath(filepath):
            raise ValueError(
                f"the checkpoint {filepath} is to be written by all processes at once, which takes "
                "a folder that they share; set dirpath of RLCheckpoint to one"
            )
        path = Path(self.broadcast(filepath))
        fresh = path.with_name(f".{path.name}.parts")
        if self.is_global_zero:
            recover_folder(path)
            open_folder(fresh)
        self.barrier()
        save_folder(checkpoint, fresh, self)
        self.barrier()
        if flaw := self.broadcast(_flaw(fresh) if self.is_global_zero else ""):
            if self.is_global_zero:
                shutil.rmtree(fresh)
            raise UnusableCheckpointError(f"{path} was not written: {flaw}")
        if self.is_global_zero:
            if self.checkpoint == "full":
                write_file(fresh, path)
            else:
                place_folder(fresh, path)
        self.barrier()

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint of any kind; tensors are read when they are asked for."""
        path = Path(self.broadcast(checkpoint_path))
        return read_checkpoint(path, weights_only=weights_only is not False)


def read_checkpoint(path: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """Read a checkpoint of any kind, its tensors when they are asked for.

    Args:
        path: Of a file or folder.
        weights_only: Refuse to run code that comes with a file.

    Raises:
        NotACheckpointError: Something else is there, or nothing.
    """
    if is_folder_checkpoint(path):
        return read_folder(path, lazy=True)
    if not path.is_file():
        what = "a folder without meta.pt" if path.is_dir() else "not there"
        raise NotACheckpointError(f"{path} is no checkpoint: it is {what}")
    with _explained(path):
        loaded = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
    if not isinstance(loaded, dict) or "state_dict" not in loaded:
        raise NotACheckpointError(f"{path} is no checkpoint: it has no state_dict")
    return loaded


def convert_checkpoint(source: Path, target: Path, to: Literal["sharded", "full"]) -> None:
    """Write a checkpoint anew, as a folder or as one file.

    Args:
        source: Of either kind.
        target: Must not exist.
        to: ``sharded``: a folder; ``full``: a file.

    Raises:
        FileExistsError: The target exists.
        NotACheckpointError: The source is no checkpoint.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists; choose another name, or remove it")
    checkpoint = (
        read_folder(source, lazy=False) if is_folder_checkpoint(source) else read_checkpoint(source)
    )
    if to == "full":
        with atomic_write(target) as handle:
            torch.save(checkpoint, handle)
    else:
        with atomic_folder(target) as fresh:
            save_folder(checkpoint, fresh, None)


def write_file(folder: Path, path: Path) -> None:
    """Turn the checkpoint of a folder into one file, and remove the folder."""
    checkpoint = read_folder(folder, lazy=False)
    with atomic_write(path) as handle:
        torch.save(checkpoint, handle)
    shutil.rmtree(folder)
