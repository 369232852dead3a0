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

    def take(self, value: Any, key: str) -> Any:
        """Return ``value`` with marks in the place of its tensors."""
        if isinstance(value, Tensor):
            self.tensors[key] = value.detach()
            return {_TENSOR: key}
        if isinstance(value, Mapping):
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
    """
    taken = _Taken()
    rest = taken.take(dict(checkpoint), "")
    several = strategy is not None and torch.distributed.is_initialized()
    tensors = {
        key: tensor if isinstance(tensor, DTensor) else tensor.cpu()
        for key, tensor in taken.tensors.items()
        if isinstance(tensor, DTensor) or not tensor.is_meta
    }
    if strategy is not None and several:
        held = strategy.broadcast({key for key, t in tensors.items() if not isinstance(t, DTensor)})
        known = strategy.broadcast(set(taken.tensors))
        if not strategy.is_global_zero:
            # what rank zero has whole, it writes
            tensors = {k: t for k, t in tensors.items() if k in known and k not in held}
    with _alone():
        save_distributed(tensors, storage_writer=FileSystemWriter(folder), no_dist=not several)
    if strategy is None or strategy.is_global_zero:
        torch.save(rest, folder / META_FILE)


def read_folder(folder: Path, *, lazy: bool) -> dict[str, Any]:
    """Read a checkpoint, as Lightning wants to have it.

    Args:
        folder: Written by `save_folder`.
        lazy: Leave dictionaries of tensors unread, as `StoredTensors`.

    Raises:
        NotACheckpointError: Something else is there.
    """
    if not is_folder_checkpoint(folder):
        raise NotACheckpointError(f"{folder} is no checkpoint: it has no {META_FILE}")
    rest = torch.load(folder / META_FILE, map_location="cpu", weights_only=True)
    if lazy:
        restored = _put_back(rest, folder, None)
    else:
        reader = _Reader(folder)
        keys = list(reader.read_metadata().state_dict_metadata)
        restored = _put_back(rest, folder, _read(reader, keys))
    assert isinstance(restored, dict)
    return restored


def _put_back(value: Any, folder: Path, tensors: Mapping[str, Tensor] | None) -> Any:
    """Put tensors, read already or to be read, in the place of their marks."""
    if isinstance(value, dict):
        if _TENSOR in value:
            key = value[_TENSOR]
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
            with (self._folder / ".metadata").open("rb") as stream:
                found = _ListUnpickler(stream).load()
            if not isinstance(found, Metadata):
                raise NotACheckpointError(f"{self._folder}/.metadata is no list of tensors")
            found.storage_meta = found.storage_meta or StorageMeta()
            self._list = found
        return self._list


class _ListUnpickler(pickle.Unpickler):
    """PyTorch pickles the list; only what such a list is made of is let through."""

    def find_class(self, module: str, name: str) -> Any:
        described = module in (
            "torch.distributed.checkpoint.metadata",
            "torch.distributed.checkpoint.filesystem",
        )
        plain = module == "torch" and (name == "Size" or isinstance(vars(torch)[name], torch.dtype))
        layout = (module, name) == ("torch.serialization", "_get_layout")
        path = module.split(".")[0] == "pathlib" and name.endswith("Path")
        if described or plain or layout or path:
            return super().find_class(module, name)
        raise NotACheckpointError(
            f"a checkpoint's list of tensors names {module}.{name}, which no such list contains: "
            "it is damaged, or was made to run code"
        )


def _read(reader: _Reader, keys: list[str]) -> dict[str, Tensor]:
    """Read whole tensors, without asking the other ranks."""
    listed = reader.read_metadata().state_dict_metadata
    targets: dict[str, Tensor] = {}
    for key in keys:
        about = listed[key]
        assert isinstance(about, TensorStorageMetadata)
        targets[key] = torch.empty(about.size, dtype=about.properties.dtype)
    with _alone():
        load_distributed(dict(targets), storage_reader=reader, no_dist=True)
    return targets


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Leave out PyTorch's remark on reading or writing without other processes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


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
        path = Path(self.broadcast(filepath))
        fresh = path.with_name(f".{path.name}.tmp")
        if self.is_global_zero:
            recover_folder(path)
            open_folder(fresh)
        self.barrier()
        save_folder(checkpoint, fresh, self)
        self.barrier()
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
    try:
        loaded: dict[str, Any] = torch.load(
            path, map_location="cpu", weights_only=weights_only, mmap=True
        )
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise NotACheckpointError(f"{path} cannot be read as a checkpoint: {error}") from error
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
    if path.is_dir():
        shutil.rmtree(path)
    with atomic_write(path) as handle:
        torch.save(checkpoint, handle)
    shutil.rmtree(folder)
