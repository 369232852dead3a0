"""Checkpoints as folders that all ranks write to at once.

A folder holds every tensor of the checkpoint under a key of its own, as PyTorch's distributed
checkpoints do, and ``meta.pt`` with everything else. A key stands for a whole tensor, however it is
split, so any number of processes and any strategy can read it.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.tensor import DTensor

from lrlhf.run.atomic import (
    atomic_folder,
    atomic_write,
    check_room,
    naming,
    place_folder,
    recover_folder,
    remove_unclaimed,
    temporary_folder,
)
from lrlhf.run.checkpoints.checkpoint_reader import (
    META_FILE,
    TENSOR_MARK,
    FolderReader,
    is_folder_checkpoint,
    read_checkpoint,
    read_folder,
    without_remarks,
)
from lrlhf.run.checkpoints.checkpoint_search import check
from lrlhf.run.checkpoints.checksums import write_checksums
from lrlhf.run.collectives import from_rank_zero

PARTS: Final = "parts"
"""Ending of a folder that several processes are writing."""


class UnusableCheckpointError(RuntimeError):
    """What was to become a checkpoint could not be read again; the one before it is kept."""


@dataclass
class _Taken:
    """A checkpoint's tensors by key, taken out of it."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    _keys: dict[int, str] = field(default_factory=dict)

    def take(self, value: Any, key: str) -> Any:
        """Return ``value`` with marks in the place of its tensors."""
        if isinstance(value, Tensor):
            if id(value) in self._keys:  # tied weights are one tensor with several names
                return {TENSOR_MARK: self._keys[id(value)]}
            while key in self.tensors:  # {"a": {"b": …}, "a/b": …}, or {0: …, "0": …}
                key += "'"
            self.tensors[key] = value.detach()
            self._keys[id(value)] = key
            return {TENSOR_MARK: key}
        if isinstance(value, Mapping):
            if TENSOR_MARK in value:
                raise ValueError(
                    f"{key or 'the checkpoint'} has an entry {TENSOR_MARK!r}, which stands for a "
                    "tensor in a checkpoint's folder; rename it"
                )
            return {name: self.take(part, f"{key}/{name}") for name, part in value.items()}
        if isinstance(value, list | tuple):
            parts = [self.take(part, f"{key}/{index}") for index, part in enumerate(value)]
            return parts if isinstance(value, list) else tuple(parts)
        return value


def save_folder(checkpoint: Mapping[str, Any], folder: Path, strategy: Strategy | None) -> None:
    """Write a checkpoint into an empty folder that exists on all ranks.

    All ranks have the same structure, but only the tensors that rank zero lacks are taken from
    others. A tensor is a `DTensor`, whole, or on the meta device where another rank has it. Without
    a ``strategy`` there is one process and no run.

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
    on_ranks = [set(tensors)]
    if strategy is not None and several:
        on_ranks *= torch.distributed.get_world_size()
        torch.distributed.all_gather_object(on_ranks, set(tensors))
        held = strategy.broadcast({key for key, t in tensors.items() if not isinstance(t, DTensor)})
        known = strategy.broadcast(set(taken.tensors))
        if not strategy.is_global_zero:
            # what rank zero has whole, it writes
            tensors = {k: t for k, t in tensors.items() if k in known and k not in held}
    else:
        known = set(taken.tensors)
    if missing := sorted(known.difference(*on_ranks)):
        raise ValueError(f"no rank holds {missing[0]} ({len(missing)} such tensors)")
    with without_remarks():
        save_distributed(tensors, storage_writer=_Writer(folder), no_dist=not several)
    if strategy is None or strategy.is_global_zero:
        # torch tells of a full disk only where it did not open the file itself
        with naming(folder / META_FILE), (folder / META_FILE).open("wb") as handle:
            torch.save(rest, handle)
    rank = torch.distributed.get_rank() if several else 0
    write_checksums(folder, strategy if several else None, rank)


class _Writer(FileSystemWriter):
    """Has what the system said of a write reach the other ranks, who are told by a pickle."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _NamingFileSystem()


class _NamingFileSystem(FileSystem):
    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with naming(Path(path)), super().create_stream(path, mode) as stream:
            yield stream


def _flaw(folder: Path) -> str:
    """Say why a folder that was just written could not be read; empty: it can."""
    try:
        torch.load(folder / META_FILE, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        return f"a callback or module saves something that only code could restore: {error}"
    parts = FolderReader(folder).read_metadata().storage_data or {}
    missing = {part.relative_path for part in parts.values()}
    missing = {name for name in missing if not (folder / name).is_file()}
    if missing:
        return (
            f"{sorted(missing)[0]}, which another process wrote, is not there: all processes must "
            "see the same folder; set dirpath of RLCheckpoint to one on a shared disk"
        )
    return ""


class FolderCheckpoints(Strategy):
    """The part of a strategy that writes checkpoints from all ranks, and reads them."""

    checkpoint: Literal["sharded", "full"]

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def _on_gpu(self) -> bool:
        return self.root_device.type != "cpu"

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

        def prepare() -> None:
            recover_folder(path)
            remove_unclaimed(path.parent, path.name, PARTS)
            check_room(path, checkpoint)

        from_rank_zero(self, prepare)
        own = temporary_folder(path, PARTS) if self.is_global_zero else contextlib.nullcontext()
        with own as made:
            fresh = self.broadcast(made)
            assert fresh is not None, "rank zero has made it"
            with naming(path, fresh):
                self._save_parts(checkpoint, fresh, path)
        self.barrier()

    def _save_parts(self, checkpoint: dict[str, Any], fresh: Path, path: Path) -> None:
        """Fill a folder that all ranks see, and have what was asked for take its name."""
        save_folder(checkpoint, fresh, self)
        self.barrier()
        if flaw := self.broadcast(_flaw(fresh) if self.is_global_zero else ""):
            raise UnusableCheckpointError(f"{path} was not written: {flaw}")
        if self.is_global_zero:
            if self.checkpoint == "full":
                _write_file(read_folder(fresh, lazy=False), path)
            else:
                place_folder(fresh, path)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint of any kind; tensors are read when they are asked for."""
        path = Path(self.broadcast(checkpoint_path))
        check(path, together=True)
        return read_checkpoint(path, weights_only=weights_only is not False)


def convert_checkpoint(source: Path, target: Path, to: Literal["sharded", "full"]) -> None:
    """Write a checkpoint of either kind anew, as a folder (``sharded``) or one file (``full``).

    Raises:
        FileExistsError: The target exists.
        NotACheckpointError: The source is no checkpoint.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists; choose another name, or remove it")
    if source.exists():
        check(source)
    checkpoint = (
        read_folder(source, lazy=False) if is_folder_checkpoint(source) else read_checkpoint(source)
    )
    if to == "full":
        _write_file(checkpoint, target)
    else:
        with atomic_folder(target) as fresh:
            save_folder(checkpoint, fresh, None)


def _write_file(checkpoint: Mapping[str, Any], path: Path) -> None:
    with atomic_write(path) as handle:
        torch.save(checkpoint, handle)
