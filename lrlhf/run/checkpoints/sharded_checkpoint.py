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
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lrlhf.models.sharding import CheckpointMismatchError, check_same_names, stored_like
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
from lrlhf.run.checkpoints.background_saves import BackgroundSaves, Ranks
from lrlhf.run.checkpoints.checkpoint_reader import (
    META_FILE,
    TENSOR_MARK,
    FolderReader,
    explained,
    is_folder_checkpoint,
    read_checkpoint,
    read_folder,
    unwrapped,
    without_remarks,
    write_checksums,
)
from lrlhf.run.checkpoints.checkpoint_search import check
from lrlhf.run.collectives import from_rank_zero
from lrlhf.run.lightning_internals import timeout_of


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target, brings it to the disk, then renames it.

    Lightning's own builds the file in memory and in the system's temporary folder first, from where
    a move to another disk is no single step: a kill leaves half a checkpoint. Paths with a protocol
    (``s3://…``) go Lightning's way. Folders of sharded strategies are read too, so that a run which
    was split goes on in one process, and what is read is compared with its checksums.
    """

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        if storage_options is not None or "://" in os.fspath(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        check_room(Path(path), checkpoint)
        with atomic_write(Path(path)) as handle:
            torch.save(checkpoint, handle)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        local = "://" not in os.fspath(path)
        if local and os.path.lexists(path):
            check(Path(path))
        if local and Path(path).is_dir():
            return read_folder(Path(path), lazy=False)
        # not to run code that comes with a file is the default here, whatever Lightning's is
        there = local and Path(path).exists()
        with explained(Path(path)) if there else contextlib.nullcontext():
            return super().load_checkpoint(path, map_location, weights_only is not False)


def use_atomic_checkpoints(trainer: L.Trainer) -> None:
    """Have checkpoints written and read by `AtomicCheckpointIO`, unless another way was chosen."""
    strategy = trainer.strategy
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = AtomicCheckpointIO()


PARTS: Final = "parts"
"""Ending of a folder that several processes are writing."""


class UnusableCheckpointError(RuntimeError):
    """What was to become a checkpoint could not be read again; the one before it is kept."""


@dataclass
class _ExtractedTensors:
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


class Snapshot(NamedTuple):
    """What one rank writes of a checkpoint."""

    tensors: Mapping[str, Tensor]
    rest: bytes


def save_folder(checkpoint: Mapping[str, Any], folder: Path, strategy: Strategy | None) -> None:
    """Write a checkpoint into an empty folder that exists on all ranks.

    All ranks have the same structure, but only the tensors that rank zero lacks are taken from
    others. A tensor is a `DTensor`, whole, or on the meta device where another rank has it. Without
    a ``strategy`` there is one process and no run.

    Raises:
        ValueError: A tensor is on the meta device everywhere, or a name has another use.
    """
    ranks = Ranks(several=strategy is not None and torch.distributed.is_initialized())
    _write_snapshot(_snapshot(checkpoint, ranks), folder, ranks)


def _snapshot(checkpoint: Mapping[str, Any], ranks: Ranks) -> Snapshot:
    """Say what this rank writes; tensors are those of the checkpoint, where they are on the CPU."""
    extracted = _ExtractedTensors()
    marked, rest = extracted.take(dict(checkpoint), ""), io.BytesIO()
    if ranks.rank == 0:
        torch.save(marked, rest)
    tensors = {
        key: tensor
        for key, tensor in extracted.tensors.items()
        if isinstance(tensor, DTensor) or not tensor.is_meta
    }
    unsharded = {key for key, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    on_ranks = ranks.all(lambda: set(tensors))
    known, replicated = ranks.on_zero(lambda: (set(extracted.tensors), unsharded))
    if ranks.rank:
        # what rank zero has whole, it writes
        tensors = {k: t for k, t in tensors.items() if k in known and k not in replicated}
    if missing := sorted(known.difference(*on_ranks)):
        raise ValueError(f"no rank holds {missing[0]} ({len(missing)} such tensors)")
    return Snapshot(tensors, rest.getvalue())


def _write_snapshot(snapshot: Snapshot, folder: Path, ranks: Ranks) -> None:
    tensors = {
        key: tensor if isinstance(tensor, DTensor) else tensor.cpu()
        for key, tensor in snapshot.tensors.items()
    }
    # warnings are left alone in the background, where other threads may look at them
    with unwrapped() if ranks.several else without_remarks():
        save_distributed(
            tensors,
            storage_writer=_Writer(folder),
            process_group=ranks.group,
            no_dist=not ranks.several,
        )
    ranks.on_zero(lambda: _write_rest(snapshot.rest, folder / META_FILE))
    write_checksums(folder, ranks)


def _write_rest(rest: bytes, path: Path) -> None:
    with naming(path):
        path.write_bytes(rest)


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
    async_save = False
    _background: BackgroundSaves | None = None
    _may_wait = False

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def _on_gpu(self) -> bool:
        return self.root_device.type != "cpu"

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """Have what is saved inside be written later, if ``async_save`` is on."""
        self._may_wait = self.async_save
        try:
            yield
        finally:
            self._may_wait = False

    def is_saving(self) -> bool:
        """Tell, the same on all ranks, whether something is still being written."""
        return self._background is not None and self.broadcast(self._background.is_busy())

    def finish_saves(self) -> None:
        """Wait until all that was saved is on the disk; raises on all ranks what came between."""
        if self._background is not None:
            self._background.finish()

    def end_saves(self) -> None:
        """Wait as `finish_saves` does, in a run that may have failed on some ranks only."""
        if self._background is not None:
            self._background.close()
            self._background = None  # a further fit has connections of its own

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
        self.finish_saves()

        def prepare() -> None:
            recover_folder(path)
            remove_unclaimed(path.parent, path.name, PARTS)
            check_room(path, checkpoint)

        from_rank_zero(self, prepare)
        ranks = Ranks(several=torch.distributed.is_initialized())
        snapshot = _snapshot(checkpoint, ranks)
        if not self._may_wait:
            self._write(snapshot, path, ranks)
            return
        if self._background is None:
            self._background = BackgroundSaves(self.root_device, timeout=timeout_of(self))
        copied = snapshot._replace(tensors=self._background.copy(snapshot.tensors))
        self._background.start(lambda own: self._write(copied, path, own))

    def _write(self, snapshot: Snapshot, path: Path, ranks: Ranks) -> None:
        """Fill a folder that all ranks see, and have what was asked for take its name."""
        with contextlib.ExitStack() as made:
            fresh = ranks.on_zero(lambda: made.enter_context(temporary_folder(path, PARTS)))
            with naming(path, fresh):
                _write_snapshot(snapshot, fresh, ranks)
                ranks.on_zero(lambda: self._place(fresh, path))

    def _place(self, fresh: Path, path: Path) -> None:
        if flaw := _flaw(fresh):
            raise UnusableCheckpointError(f"{path} was not written: {flaw}")
        if self.checkpoint == "full":
            _write_file(read_folder(fresh, lazy=False), path)
        else:
            place_folder(fresh, path)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint of any kind; tensors are read when they are asked for."""
        self.finish_saves()
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


def optimizer_state(module: L.LightningModule, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state with its parameters under their names."""
    plain = _plain(optimizer)
    names: dict[Tensor, str] = {weight: name for name, weight in module.named_parameters()}
    groups = [
        {**group, "params": [names[parameter] for parameter in group["params"]]}
        for group in plain.param_groups
    ]
    state = {names[parameter]: dict(values) for parameter, values in plain.state.items()}
    return {"state": state, "param_groups": groups}


def load_optimizer_state(
    module: L.LightningModule, optimizer: Optimizer, stored: Mapping[str, Any]
) -> None:
    """Restore what `optimizer_state` returned, or Lightning's own form of it.

    Raises:
        CheckpointMismatchError: It is the state of other parameters.
    """
    plain = _plain(optimizer)
    own = [parameter for group in plain.param_groups for parameter in group["params"]]
    names: dict[Tensor, str] = {weight: name for name, weight in module.named_parameters()}
    saved = stored_names(stored, plain, [names[parameter] for parameter in own])
    position = {saved[names[parameter]]: index for index, parameter in enumerate(own)}
    state = {
        position[key]: {name: stored_like(values, name, own[position[key]]) for name in values}
        for key, values in stored["state"].items()
    }
    counter = iter(range(len(own)))
    groups = [
        {**old, "params": [next(counter) for _ in group["params"]]}
        for old, group in zip(stored["param_groups"], plain.param_groups, strict=True)
    ]
    plain.load_state_dict({"state": state, "param_groups": groups})


def stored_names(stored: Mapping[str, Any], optimizer: Optimizer, own: list[str]) -> dict[str, Any]:
    """Map ``own`` names, in order, to what stands for each in a stored state: itself, or a number.

    Raises:
        CheckpointMismatchError: The parameters are others.
    """
    keys = list(chain.from_iterable(group["params"] for group in stored["param_groups"]))
    if len(keys) != len(own):
        raise CheckpointMismatchError(
            f"the checkpoint's optimizer has {len(keys)} parameters and this one {len(own)}; "
            "resume with the model (and LoRA settings) that the run was started with"
        )
    groups, own_groups = len(stored["param_groups"]), len(optimizer.param_groups)
    if groups != own_groups:
        raise CheckpointMismatchError(
            f"the checkpoint's optimizer has {groups} groups of parameters and this one "
            f"{own_groups}; resume with the optimizer settings that the run was started with"
        )
    if all(isinstance(key, str) for key in keys):
        check_same_names("the checkpoint's optimizer", keys, own)
        return {name: name for name in own}
    return dict(zip(own, keys, strict=True))


def _plain(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
