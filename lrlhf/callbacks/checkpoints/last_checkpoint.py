"""What ``--ckpt_path last`` and ``best`` stand for, and what becomes of damaged checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lrlhf.functional.names import unknown_name
from lrlhf.modules.contracts import NamesMetrics
from lrlhf.run.atomic import TEMPORARY, atomic_link, check_room, remove, remove_unclaimed
from lrlhf.run.checkpoints.checkpoint_search import (
    Found,
    newest_intact,
    places_in,
    ranking_states,
    recover_checkpoints,
)
from lrlhf.run.checkpoints.checksums import NotACheckpointError
from lrlhf.run.checkpoints.sharded_checkpoint import PARTS
from lrlhf.run.folder_lock import hold_folder, is_held_by_another

_logger = logging.getLogger(__name__)
_REMOVED = "removed"


def find_last(trainer: L.Trainer, folder: Path, name: str) -> Found:
    """Choose the checkpoint to go on from; rank zero lists them, and all ranks read them.

    The trainer asks before it sets anything up. That there are some and none is whole is an error.
    """
    strategy = trainer.strategy if trainer.world_size > 1 else None
    if strategy is not None:
        # the trainer does so a little later, when there is nothing left to do
        strategy.setup_environment()
    if trainer.state.fn == TrainerFn.FITTING:
        hold_folder(trainer, folder)
    tidy = trainer.is_global_zero and not is_held_by_another(folder)
    found = newest_intact(folder, name, strategy, tidy=tidy)
    if found.path is None and not found.passed:
        _logger.info("%s has no checkpoint yet: the run starts from the beginning", folder)
    else:
        _used(found, folder, "leave out --ckpt_path to start from the beginning")
    return found


def _used(found: Found, folder: Path, instead: str) -> Path:
    """Return the checkpoint that is used, and say which ones were passed over for it."""
    if found.path is None:
        told = "; ".join(f"{path.name}: {flaw}" for path, flaw in found.passed.items())
        raise NotACheckpointError(
            f"{folder} has checkpoints, and none of them can be used: {told}. Restore one, or "
            f"{instead}"
        )
    for path, flaw in found.passed.items():
        rank_zero_warn(f"{path} is passed over, and {found.path.name} is used: {flaw}")
    return found.path


def find_newest(folder: Path, name: str, word: str) -> Path:
    """Return the newest checkpoint of a folder, for an evaluation; every process looks by itself.

    It needs no process group, which is not there yet, and no lock, as nothing is written.

    Raises:
        ValueError: There is none that ``ckpt_path``, which is ``word``, could stand for.
        NotACheckpointError: There are some, and none is whole.
    """
    found = newest_intact(folder, name)
    if found.path is None and not found.passed:
        raise ValueError(f"ckpt_path is {word}, and {folder} has no checkpoint")
    return _used(found, folder, "name another one with --ckpt_path")


def find_best(folder: Path, name: str) -> Path:
    """Return the best checkpoint of a folder, as its newest one knows it.

    Raises:
        ValueError: There is none; says why, and what to do instead.
    """
    last = find_newest(folder, name, "best")
    for state in ranking_states(last):
        if state["best_model_path"]:
            # the folder may have been moved since
            best = Path(state["best_model_path"])
            known = Path(state["dirpath"])
            return folder / (best.relative_to(known) if known in best.parents else best.name)
    raise ValueError(
        f"ckpt_path is best, and no checkpoint of {folder} was ranked: RLCheckpoint ranks them by "
        "its monitor (such as eval/score), when a validation has measured it. Take last"
    )


def score_of(metrics: Mapping[str, Any], monitor: str, mode: str) -> Tensor:
    """Return the metric that ranks a checkpoint; one that is NaN is the worst.

    Raises:
        ValueError: It is not logged; names those that are.
    """
    if monitor not in metrics:
        raise ValueError(
            f"RLCheckpoint monitor {monitor!r} is no logged metric; there are "
            f"{', '.join(sorted(metrics))}"
        )
    score: Tensor = metrics[monitor].detach().clone()
    worst = float("inf") if mode == "min" else float("-inf")
    return torch.where(torch.isnan(score), worst, score)


def check_monitor(trainer: L.Trainer, module: L.LightningModule, monitor: str | None) -> None:
    """Refuse a metric that no evaluation of the run will measure, before anything is trained.

    Code of the user's own may log whatever it likes, and is not judged.

    Raises:
        ValueError: There is no such metric; names the nearest, or there is no validation.
    """
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    own = {type(one).__module__.partition(".")[0] for one in (module, *callbacks)}
    if own - {"lrlhf", "lightning"} or not isinstance(module, NamesMetrics):
        return
    fits = trainer.state.fn == TrainerFn.FITTING
    if not fits or monitor is None or not monitor.startswith("eval/"):
        return
    known = module.evaluation_names()
    if not known:
        raise ValueError(
            f"RLCheckpoint monitor is {monitor!r}, and there is nothing to validate on: give the "
            "data val, val_size or val_fraction"
        )
    if monitor not in known:
        raise unknown_name("RLCheckpoint monitor", monitor, sorted(known))


def prepare_folder(
    trainer: L.Trainer, folder: Path, found: Found, last: str, weights: Mapping[str, Any]
) -> None:
    """Tidy a folder up before checkpoints are written there, and see to it that they fit.

    Every rank must call it.

    Args:
        trainer: What will write them.
        folder: Of the checkpoints.
        found: What the run goes on from, and what is damaged.
        last: Is to lead to what was found in its place; empty: nothing is.
        weights: Of the module.

    Raises:
        OSError: The disk has no room for a checkpoint; on every rank.
    """
    refusal: OSError | None = None
    if trainer.is_global_zero:
        try:
            rename_damaged(folder, found.damaged)
            remove_leftovers(folder)
            if found.path and last and found.path.resolve() != Path(last).resolve():
                atomic_link(Path(last), found.path)
            check_room(folder, weights, "a checkpoint's weights")
        except OSError as error:  # the others wait to be told
            refusal = error
        if trainer.global_step == 0 and any(folder.glob("*.ckpt")):
            rank_zero_warn(
                f"{folder} holds checkpoints of an earlier run, and this one starts from the "
                "beginning beside them; resume with --ckpt_path last, or choose another dirpath"
            )
    refusal = trainer.strategy.broadcast(refusal)
    if refusal is not None:
        raise refusal


def call_last(trainer: L.Trainer, last: Path, saved: Path) -> None:
    """Have the name of the last checkpoint lead to one that was saved; every rank must call it."""
    if trainer.is_global_zero:
        atomic_link(last, saved)
    trainer.strategy.barrier("last_checkpoint")


def rename_damaged(folder: Path, damaged: Sequence[Path]) -> None:
    """Rename what is damaged, so that nothing takes it for a checkpoint, and keep it."""
    for path in damaged:
        if folder not in path.parents or not path.exists():
            continue
        name, count = f"{path.name}.damaged", 1
        while path.with_name(name).exists():
            count += 1
            name = f"{path.name}.damaged{count}"
        path.rename(path.with_name(name))
        _logger.warning("%s is kept as %s", path, name)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that is to be removed, in one step; returns its new name.

    Removing a folder takes many steps. A kill between them would leave half a checkpoint under the
    name of a whole one.
    """
    hidden = path.with_name(f".{path.name}.{_REMOVED}")
    if path.exists():
        remove(hidden)
        path.rename(hidden)
    return hidden


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process had set aside, or had not written to the end."""
    recover_checkpoints(folder)
    for place in list(places_in(folder)):
        for ending in (_REMOVED, TEMPORARY, PARTS):
            remove_unclaimed(place, "ckpt", ending)
