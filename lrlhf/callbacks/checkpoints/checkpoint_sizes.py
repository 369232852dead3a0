"""How much room checkpoints take, which of them go when it is too much, and how they go."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from lrlhf.models.zero import is_partitioned
from lrlhf.run.atomic import TEMPORARY, remove, remove_unclaimed
from lrlhf.run.checkpoints.checkpoint_search import checkpoints_in, places_in, recover_checkpoints
from lrlhf.run.checkpoints.sharded_checkpoint import PARTS

_logger = logging.getLogger(__name__)

GB = 1e9
_REMOVED = "removed"
# tensors of a parameter's size that an optimizer keeps for it, by the name of its class
_MOMENTS = {"SGD": 0, "Adagrad": 1, "RMSprop": 1, "Lion": 1}
_ADAM = 2


@dataclass(frozen=True, slots=True)
class SizeForecast:
    """Bytes that one checkpoint will take.

    Args:
        weights: Of the module.
        optimizers: Their state once they have taken a step.
        callbacks: Averages and the like.
    """

    weights: int
    optimizers: int
    callbacks: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.optimizers + self.callbacks

    def __str__(self) -> str:
        parts = {"weights": self.weights, "optimizers": self.optimizers, "averages": self.callbacks}
        listed = ", ".join(f"{name} {in_gb(size)}" for name, size in parts.items() if size)
        return f"{in_gb(self.total)} ({listed})"


def forecast_size(trainer: L.Trainer, *, weights_only: bool) -> SizeForecast:
    """Say how large a checkpoint of a run will be, before the first is written.

    Args:
        trainer: Of a run that is set up; all ranks must call.
        weights_only: Whether only weights are saved.
    """
    weights = _bytes(trainer.lightning_module.state_dict(keep_vars=True).values())
    if weights_only:
        return SizeForecast(weights, 0, 0)
    optimizers = _optimizers_bytes(trainer)
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    states = sum(
        _nested_bytes(callback.state_dict())
        for callback in callbacks
        if not isinstance(callback, Checkpoint)
    )
    return SizeForecast(weights, optimizers, states)


def check_room(folder: Path, forecast: SizeForecast, *, limit_gb: float | None) -> str:
    """Compare a forecast with the disk and with the limit that was set.

    Args:
        folder: Where the checkpoints go; need not exist.
        forecast: Of one checkpoint.
        limit_gb: ``max_total_size_gb``.

    Returns:
        A warning; empty if all is well.

    Raises:
        ValueError: Not one checkpoint fits.
    """
    free = shutil.disk_usage(_existing(folder)).free
    one = f"a checkpoint takes about {forecast}"
    if free < forecast.total:
        raise ValueError(
            f"{one}, and {folder} has {in_gb(free)} free: make room, set another dirpath, or "
            "save_weights_only: true"
        )
    # the new one is written before an old one goes
    if free < 2 * forecast.total:
        return f"{one}, and {folder} has {in_gb(free)} free, which is not enough for two"
    if limit_gb is not None and limit_gb * GB < 2 * forecast.total:
        return (
            f"{one}; the newest one and last.ckpt stay, so max_total_size_gb {limit_gb:g} will not "
            "be kept"
        )
    _logger.info("%s; %s has %s free", one, folder, in_gb(free))
    return ""


def checkpoint_sizes(folder: Path) -> dict[Path, int]:
    """Bytes of each checkpoint in a folder; one that is sharded is itself a folder, a link none."""
    return {path: _size(path) for path in checkpoints_in(folder) if not path.is_symlink()}


def surplus(sizes: Mapping[Path, int], expendable: Sequence[Path], *, limit: float) -> list[Path]:
    """Choose what to remove so that the rest fits.

    Args:
        sizes: Bytes of all checkpoints.
        expendable: Those that may go, the first one first.
        limit: Bytes that may stay.
    """
    total, chosen = sum(sizes.values()), []
    for path in expendable:
        if total <= limit:
            break
        if path in sizes:
            total -= sizes[path]
            chosen.append(path)
    return chosen


def hidden_name(path: Path) -> Path:
    """Where `set_aside` puts a checkpoint."""
    return path.with_name(f".{path.name}.{_REMOVED}")


def set_aside(path: Path) -> None:
    """Rename a checkpoint that is to be removed, in one step.

    Removing a folder takes many steps. A kill between them would leave half a checkpoint under the
    name of a whole one.
    """
    hidden = hidden_name(path)
    remove(hidden)
    path.rename(hidden)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process had set aside, or had not written to the end."""
    recover_checkpoints(folder)
    for place in list(places_in(folder)):
        for ending in (_REMOVED, TEMPORARY, PARTS):
            remove_unclaimed(place, "ckpt", ending)


def in_gb(size: float) -> str:
    """Bytes as people read them."""
    return f"{size / GB:.3g} GB" if size >= 0.01 * GB else f"{size / 1e6:.3g} MB"


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _optimizers_bytes(trainer: L.Trainer) -> int:
    known = {id(parameter) for parameter in trainer.lightning_module.parameters()}
    moved = [p for one in trainer.optimizers for group in one.param_groups for p in group["params"]]
    if all(id(parameter) in known for parameter in moved):
        return sum(_optimizer_bytes(optimizer) for optimizer in trainer.optimizers)
    # DeepSpeed's optimizers move flat pieces in float32
    trained = (p for p in trainer.lightning_module.parameters() if p.requires_grad)
    return _ADAM * torch.float32.itemsize * sum(_elements(parameter) for parameter in trained)


def _optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    state = _nested_bytes(dict(optimizer.state))
    if state:
        return state
    moments = _MOMENTS.get(type(optimizer).__name__, _ADAM)
    momentum = any(group.get("momentum", 0) for group in optimizer.param_groups)
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return (moments + int(momentum)) * _bytes(trained)


def _nested_bytes(state: object) -> int:
    if isinstance(state, Tensor):
        return _bytes([state])
    if isinstance(state, Mapping):
        return sum(_nested_bytes(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(_nested_bytes(value) for value in state)
    return 0


def _bytes(tensors: Iterable[object]) -> int:
    """Bytes of whole tensors, split or not, each once."""
    unique = {id(tensor): tensor for tensor in tensors if isinstance(tensor, Tensor)}
    return sum(_elements(tensor) * tensor.element_size() for tensor in unique.values())


def _elements(tensor: Tensor) -> int:
    # a DTensor counts its whole; of a weight that ZeRO-3 split DeepSpeed remembers the size
    if is_partitioned(tensor):
        return int(vars(tensor)["ds_numel"])
    return tensor.numel()
