"""Checkpoints between iterations, each whole or absent."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, Literal
from weakref import proxy

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lrlhf.arguments import KeepsArguments
from lrlhf.functional.names import unknown_name
from lrlhf.modules.contracts import ListsMetrics
from lrlhf.run.atomic import TEMPORARY, atomic_link, check_room, remove, remove_unclaimed
from lrlhf.run.checkpoints.background_saves import finish_saves, in_background, is_saving
from lrlhf.run.checkpoints.checkpoint_reader import NotACheckpointError
from lrlhf.run.checkpoints.checkpoint_search import (
    FoundCheckpoint,
    newest_intact,
    places_in,
    ranking_states,
    recover_checkpoints,
)
from lrlhf.run.checkpoints.sharded_checkpoint import PARTS
from lrlhf.run.lightning_internals import FindsLast, logged_in_validation
from lrlhf.run.run_folder import HasRunFolder, hold_folder, is_held_by_another
from lrlhf.run.supervision.signals import SavesOnTermination

_logger = logging.getLogger(__name__)
_REMOVED = "removed"


def find_last(trainer: L.Trainer, folder: Path, name: str) -> FoundCheckpoint:
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
    checkpoint = newest_intact(folder, name, strategy, tidy=tidy)
    if checkpoint.path is None and not checkpoint.passed:
        _logger.info("%s has no checkpoint yet: the run starts from the beginning", folder)
    else:
        _used(checkpoint, folder, "leave out --ckpt_path to start from the beginning")
    return checkpoint


def _used(newest: FoundCheckpoint, folder: Path, instead: str) -> Path:
    """Return the checkpoint that is used, and say which ones were passed over for it."""
    if newest.path is None:
        flaws = "; ".join(f"{path.name}: {flaw}" for path, flaw in newest.passed.items())
        raise NotACheckpointError(
            f"{folder} has checkpoints, and none of them can be used: {flaws}. Restore one, or "
            f"{instead}"
        )
    for path, flaw in newest.passed.items():
        rank_zero_warn(f"{path} is passed over, and {newest.path.name} is used: {flaw}")
    return newest.path


def find_newest(folder: Path, name: str, word: str) -> Path:
    """Return the newest checkpoint of a folder, for an evaluation; every process looks by itself.

    It needs no process group, which is not there yet, and no lock, as nothing is written.

    Raises:
        ValueError: There is none that ``ckpt_path``, which is ``word``, could stand for.
        NotACheckpointError: There are some, and none is whole.
    """
    checkpoint = newest_intact(folder, name)
    if checkpoint.path is None and not checkpoint.passed:
        raise ValueError(f"ckpt_path is {word}, and {folder} has no checkpoint")
    return _used(checkpoint, folder, "name another one with --ckpt_path")


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
    own = {type(owner).__module__.partition(".")[0] for owner in (module, *callbacks)}
    if own - {"lrlhf", "lightning"} or not isinstance(module, ListsMetrics):
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
    trainer: L.Trainer, folder: Path, newest: FoundCheckpoint, last: str, weights: Mapping[str, Any]
) -> None:
    """Tidy a folder up before checkpoints are written there, and see to it that they fit.

    Every rank must call it.

    Args:
        trainer: What will write them.
        folder: Of the checkpoints.
        newest: What the run goes on from, and what is damaged.
        last: Is to lead to what was found in its place; empty: nothing is.
        weights: Of the module.

    Raises:
        OSError: The disk has no room for a checkpoint; on every rank.
    """
    refusal: OSError | None = None
    if trainer.is_global_zero:
        try:
            rename_damaged(folder, newest.damaged)
            remove_leftovers(folder)
            if newest.path and last and newest.path.resolve() != Path(last).resolve():
                atomic_link(Path(last), newest.path)
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


def link_last(trainer: L.Trainer, last: Path, saved: Path) -> None:
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


def rename_for_removal(path: Path) -> Path:
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


_UNSAVED_AT_MOST = timedelta(minutes=10)
_MONITORED = ("best_model_path", "best_model_score", "best_k_models", "current_score")


class RLCheckpoint(KeepsArguments, FindsLast, SavesOnTermination):
    """Saves checkpoints by step, by time or by a validation metric, under manual optimization too.

    Lightning's `ModelCheckpoint` ignores time intervals there, warns at every save, and may file
    new weights under the score of an old validation. Here a step or time trigger saves at once; a
    checkpoint that is ranked by a validation metric is saved when the next validation has measured
    it, and ``last.ckpt`` at once. Where ``last.ckpt`` would be a second copy, it is a link.

    ``--ckpt_path last`` takes the newest checkpoint that is whole. One that is damaged is passed
    over with a warning and renamed to ``….damaged``; if none is whole, that is an error.

    Args:
        dirpath: Folder of the checkpoints; None: ``checkpoints`` in the run folder. With
            Lightning's trainer that is the logger's: set it if that is another one in each run, so
            that a resumed run finds ``last.ckpt``.
        filename: Name pattern of the checkpoints.
        monitor: Logged metric that ranks the checkpoints; None: the newest are kept.
        mode: Whether a higher (``max``) or a lower (``min``) metric is better.
        save_top_k: How many checkpoints to keep: the best by ``monitor``, without it the newest;
            -1 all, 0 none beside ``last.ckpt``. None: 1 by a metric, else 2, so that there is one
            before the newest.
        save_last: Keep the newest state as ``last.ckpt``, whatever its rank: resume needs it.
        every_n_train_steps: Save each time so many steps (of a policy: iterations) are done.
        train_time_interval: Save each time so much time has passed. With neither: after each
            validation, and where there is none after each epoch; ``last.ckpt`` also whenever
            nothing has been saved for ten minutes.
        save_weights_only: Leave out what only a resumed run needs.
        auto_insert_metric_name: Write ``step=`` and the like before the values in the name.

    Raises:
        ValueError: An option is out of range.
        OSError: The disk has no room for a checkpoint.
    """

    def __init__(  # noqa: PLR0913  the constructor is the config schema
        self,
        dirpath: str | Path | None = None,
        filename: str = "{step:06d}",
        monitor: str | None = None,
        mode: Literal["min", "max"] = "max",
        save_top_k: int | None = None,
        save_last: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        save_weights_only: bool = False,
        auto_insert_metric_name: bool = True,
    ) -> None:
        if save_top_k is None:
            save_top_k = 2 if monitor is None else 1
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            monitor=monitor,
            mode=mode,
            # without a metric Lightning knows of one or all only
            save_top_k=save_top_k if monitor is not None else min(save_top_k, 1),
            save_last=save_last,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            save_weights_only=save_weights_only,
            auto_insert_metric_name=auto_insert_metric_name,
        )
        self.save_top_k = save_top_k
        self._step_interval = every_n_train_steps or 0
        self._interval = train_time_interval
        self._timed = time.monotonic()
        self._step = 0
        self._saved: list[str] = []
        """What this callback has written and not removed, the oldest first; not ``last.ckpt``."""
        self._newest = ""
        self._newest_step = 0
        self._continued_at: int | None = None
        self._waits_for_validation = False
        self._save_pending = False
        self._resumed = FoundCheckpoint(None, {}, ())
        self._ranked_by_default = False

    # ------------------------------------------------------------------ set-up and resume

    @property
    def state_key(self) -> str:
        # what a run measures must not change that of the default, or no resume would find it
        return type(self).__qualname__ if self._ranked_by_default else super().state_key

    @property
    def _folder(self) -> Path | None:
        """Folder of the checkpoints; None: it is not one of this machine's."""
        return None if "://" in str(self.dirpath) else Path(str(self.dirpath))

    def folder_of(self, trainer: L.Trainer) -> str:
        if self.dirpath is None and isinstance(trainer, HasRunFolder):
            self.dirpath = str(trainer.run_folder / "checkpoints")
        return super().folder_of(trainer)

    def rank_by(self, metric: str, mode: Literal["min", "max"] = "max") -> None:
        """Keep the checkpoint with the best value of a metric; before a run is set up."""
        self.monitor, self.save_top_k, self._ranked_by_default = metric, 1, True
        self.mode = mode

    def find_best(self, trainer: L.Trainer) -> str:
        """Return the best checkpoint of the run whose folder this is, as its newest one knows it.

        Raises:
            ValueError: There is none; says why.
        """
        return str(find_best(Path(self.folder_of(trainer)), self.CHECKPOINT_NAME_LAST))

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not self._ranked_by_default:
            check_monitor(trainer, pl_module, self.monitor)
        chosen = self.dirpath is not None
        self.folder_of(trainer)
        with warnings.catch_warnings():
            # whether the run goes on, and is right to find checkpoints, shows at its start
            warnings.filterwarnings("ignore", message="Checkpoint directory .* is not empty")
            super().setup(trainer, pl_module, stage)
        if stage == "fit" and chosen and self._folder is not None:
            # before anything is written; in a logger's folder that would be too early for some
            hold_folder(trainer, self._folder)

    def find_last(self, trainer: L.Trainer, folder: Path) -> Path | None:
        # Lightning's remark advises to configure another callback
        warnings.filterwarnings("ignore", message=r".*there is no last checkpoint available")
        self._resumed = find_last(trainer, folder, self.CHECKPOINT_NAME_LAST)
        return self._resumed.path

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._timed, self._step = time.monotonic(), trainer.global_step
        if self._ranked_by_default and not (self.best_k_models or any(trainer.num_val_batches)):
            self.monitor, self.save_top_k = None, 2  # nothing will measure it
        folder = self._folder
        if folder is None:
            return
        hold_folder(trainer, folder)
        weights = pl_module.state_dict(keep_vars=True)
        last = self.last_model_path if self.save_last else ""
        prepare_folder(trainer, folder, self._resumed, last, weights)
        same = False
        if trainer.ckpt_path is not None and self.last_model_path:
            same = os.path.realpath(trainer.ckpt_path) == os.path.realpath(self.last_model_path)
        same = trainer.strategy.broadcast(same)
        self._continued_at = trainer.global_step if same else None
        self._forget_missing(trainer)
        # a kill may have come between a new checkpoint and the removal of an old one
        self._remove_surplus(trainer)

    def _forget_missing(self, trainer: L.Trainer) -> None:
        """Rank no checkpoint that was removed after the one that the run continues from."""
        gone = {path for path in {*self._saved, *self.best_k_models} if not Path(path).exists()}
        gone = trainer.strategy.broadcast(gone)
        self._saved = [path for path in self._saved if path not in gone]
        self.best_k_models = {k: v for k, v in self.best_k_models.items() if k not in gone}
        if self.best_k_models:
            self._rank()

    def state_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _MONITORED},
            "dirpath": self.dirpath,
            "last_model_path": self.last_model_path,
            "saved": list(self._saved),
            "waits_for_validation": self._waits_for_validation,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._waits_for_validation = bool(state_dict["waits_for_validation"])
        if state_dict["dirpath"] != self.dirpath:
            return  # what is ranked there is nothing to this folder
        for name in _MONITORED:
            setattr(self, name, state_dict[name])
        self._saved = list(state_dict["saved"])
        self.last_model_path = state_dict["last_model_path"]
        if self.best_k_models:
            self._rank()

    # ------------------------------------------------------------------ when

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._save_pending and not is_saving(trainer.strategy):
            self._finish_save(trainer)
        if trainer.global_step == self._step:
            return  # a batch that only accumulated gradients, which no checkpoint holds
        self._step = trainer.global_step
        due = self._step_interval >= 1 and self._step % self._step_interval == 0
        if not (due or self._time_is_due(trainer)) or self._is_out_of_place(trainer):
            return
        if self._by_epoch:
            if self.monitor is None and not any(trainer.num_val_batches):
                self._save_if_ranked(trainer)
            self._keep_last(trainer)
            return
        # the value at hand, if any, belongs to older weights where a validation measures it
        logged = trainer.callback_metrics.keys() - logged_in_validation(trainer)
        if self.monitor is not None and self.monitor not in logged:
            self._waits_for_validation = True
        else:
            self._save_if_ranked(trainer)
        self._keep_last(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        if self._waits_for_validation:
            self._waits_for_validation = False
            self._save_if_ranked(trainer)
            # again, so that it knows of the ranking
            self._keep_last(trainer)
        elif self._by_epoch and not self._is_out_of_place(trainer):
            self._save_if_ranked(trainer)
            if trainer.global_step != self._continued_at:
                self._keep_last(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._by_epoch or any(trainer.num_val_batches) or self._is_out_of_place(trainer):
            return
        if self.monitor is None or self.monitor in trainer.callback_metrics:
            self._save_if_ranked(trainer)
        self._keep_last(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # the steps since the last trigger
        self.save_on_termination(trainer)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        # any other one may come in the middle of a step; of several ranks `Termination` takes care
        if isinstance(exception, SIGTERMException) and trainer.world_size == 1:
            self.save_on_termination(trainer)

    def save_on_termination(self, trainer: L.Trainer) -> None:
        """Save ``last.ckpt`` unless this step has been saved, by this process or the one before."""
        if trainer.global_step != self._continued_at and not self._is_out_of_place(trainer):
            self._keep_last(trainer)
        self._finish_save(trainer)

    @property
    def _by_epoch(self) -> bool:
        return not self._step_interval and self._interval is None

    def _is_out_of_place(self, trainer: L.Trainer) -> bool:
        """Tell whether nothing is to be saved: it has been, or the trainer does something else."""
        return bool(
            trainer.fast_dev_run  # type: ignore[attr-defined]
            or trainer.state.fn != TrainerFn.FITTING
            or trainer.sanity_checking
            or trainer.global_step == self._newest_step
        )

    def _time_is_due(self, trainer: L.Trainer) -> bool:
        interval = _UNSAVED_AT_MOST if self._by_epoch else self._interval
        if interval is None:
            return False
        now = time.monotonic()
        # the clocks of the ranks differ: rank zero decides
        if not trainer.strategy.broadcast(now - self._timed >= interval.total_seconds()):
            return False
        self._timed = now
        return True

    # ------------------------------------------------------------------ what, and what goes for it

    def _save_if_ranked(self, trainer: L.Trainer) -> None:
        """Save a checkpoint, unless better ones leave no place for it, and remove what it beats."""
        if self.save_top_k == 0:
            return
        self._finish_save(trainer)
        now = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        metrics = trainer.callback_metrics | {k: torch.tensor(v) for k, v in now.items()}
        replaced = self.best_model_path
        if self.monitor is not None:
            score = score_of(metrics, self.monitor, self.mode)
            if not self.check_monitor_top_k(trainer, score):
                return
            replaced = ""
            if len(self.best_k_models) == self.save_top_k:
                replaced = self.kth_best_model_path
                self.best_k_models.pop(replaced)
        path, version = self.format_checkpoint_name(metrics), self.STARTING_VERSION
        while path != replaced and self.file_exists(path, trainer):
            path = self.format_checkpoint_name(metrics, ver=version)
            version += 1
        if self.monitor is None:
            self.best_model_path = path
        else:
            self.best_k_models[path] = self.current_score = score
            self._rank()
        self._save(trainer, path)

    def _rank(self) -> None:
        scores = self.best_k_models
        ranked = sorted(scores, key=lambda path: float(scores[path]), reverse=self.mode == "min")
        self.kth_best_model_path, self.best_model_path = ranked[0], ranked[-1]
        self.kth_value, self.best_model_score = scores[ranked[0]], scores[ranked[-1]]

    def _keep_last(self, trainer: L.Trainer) -> None:
        """Have ``last.ckpt`` hold this step, as its own checkpoint if there is none to link."""
        linked = self._folder is not None and self._newest not in ("", self.last_model_path)
        if self.save_last and not (linked and self._newest_step == trainer.global_step):
            self._save(trainer, self.last_model_path or self._name_last(trainer))

    def _save(self, trainer: L.Trainer, path: str) -> None:
        self._finish_save(trainer)
        if self.save_last and not self.last_model_path:
            # before the checkpoint is made, which is to know the name
            self.last_model_path = self._name_last(trainer)
        if path != self.last_model_path:
            # it knows of itself too
            self._saved = [*(saved for saved in self._saved if saved != path), path]
        with in_background(trainer.strategy):
            trainer.save_checkpoint(path, self.save_weights_only)
        self._newest, self._newest_step = path, trainer.global_step
        if self._by_epoch:
            self._timed = time.monotonic()
        self._save_pending = True
        if not is_saving(trainer.strategy):
            self._finish_save(trainer)

    def _finish_save(self, trainer: L.Trainer) -> None:
        """Do what follows a save when it is on the disk, which is waited for."""
        pending, self._save_pending = self._save_pending, False
        try:
            finish_saves(trainer.strategy)
        except Exception:
            self._newest, self._newest_step = "", 0  # it is not there
            raise
        if not pending:
            return
        if self.save_last and self._folder is not None and self._newest != self.last_model_path:
            link_last(trainer, Path(self.last_model_path), Path(self._newest))
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.after_save_checkpoint(proxy(self))
        self._remove_surplus(trainer)

    def _name_last(self, trainer: L.Trainer) -> str:
        """Choose a name that no earlier run has."""
        start, ending = f"{self.dirpath}/{self.CHECKPOINT_NAME_LAST}", self.FILE_EXTENSION
        names = (f"{start}{f'-v{version}' * (version > 0)}{ending}" for version in count())
        return next(name for name in names if not self.file_exists(name, trainer))

    def _remove_surplus(self, trainer: L.Trainer) -> None:
        """Remove what ``save_top_k`` leaves no room for, as far as this callback saved it."""
        surplus: Sequence[str] = ()
        if self.save_top_k >= 1:
            ranked = self.best_k_models
            surplus = [path for path in self._saved if path not in ranked]
            if self.monitor is None:
                surplus = self._saved[: -self.save_top_k]
        for path in [each for each in surplus if not self._is_spared(trainer, each)]:
            self._saved.remove(path)
            local = self._folder is not None and trainer.is_global_zero
            trainer.strategy.remove_checkpoint(rename_for_removal(Path(path)) if local else path)

    def _is_spared(self, trainer: L.Trainer, path: str) -> bool:
        """Tell whether a checkpoint stays: it lies elsewhere, or the run was resumed from it."""
        if self._folder is None:
            return False
        file, chosen = Path(path).absolute(), trainer.ckpt_path
        if chosen is not None and self._resumed.path is None and Path(chosen).absolute() == file:
            return True
        return self._folder.absolute() not in file.parents
