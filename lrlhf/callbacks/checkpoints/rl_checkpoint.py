"""Checkpoints between iterations, each whole or absent."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lrlhf.callbacks.checkpoints.retention import RetainingCheckpoint
from lrlhf.run.supervision.signals import SavesOnTermination


class RLCheckpoint(RetainingCheckpoint, SavesOnTermination):
    """Saves checkpoints by step, by time or by a validation metric, under manual optimization too.

    Lightning's `ModelCheckpoint` ignores time intervals there, warns at every save, and may file
    new weights under the score of an old validation. Here a step or time trigger saves at once; a
    checkpoint that is ranked by a validation metric is saved when the next validation has measured
    it, and ``last.ckpt`` at once. Where ``last.ckpt`` would be a second copy, it is a link.

    ``--ckpt_path last`` takes the newest checkpoint that is whole. One that is damaged is passed
    over with a warning and renamed to ``….damaged``; if none is whole, that is an error.

    Args:
        dirpath: Folder of the checkpoints. Set it: a resumed run then finds ``last.ckpt`` where
            the first run wrote it. None: ``checkpoints`` in the logger's folder.
        filename: Name pattern of the checkpoints.
        monitor: Logged metric that ranks the checkpoints; None: the newest are kept.
        mode: Whether a higher (``max``) or a lower (``min``) metric is better.
        save_top_k: How many checkpoints to keep: the best by ``monitor``, without it the newest;
            -1 all, 0 none beside ``last.ckpt``. None: 1 by a metric, else 2, so that there is one
            before the newest.
        save_last: Keep the newest state as ``last.ckpt``, whatever its rank: resume needs it.
        every_n_train_steps: Save each time so many steps (of a policy: iterations) are done.
        train_time_interval: Save each time so much time has passed. With neither: after each
            validation, and where there is none after each epoch.
        save_weights_only: Leave out what only a resumed run needs.
        auto_insert_metric_name: Write ``step=`` and the like before the values in the name.
        verbose: Say which checkpoints are saved.
        max_total_size_gb: How much room the checkpoints in the folder may take, in GB of 10⁹ bytes.
            When they take more, those of this callback are removed, the worst ones first, or the
            oldest ones where nothing ranks them; never ``last.ckpt``, the newest one, the best one
            and the one that the run continued from. None: no limit.

    Raises:
        ValueError: An option is out of range, or the disk has no room for a checkpoint.
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
        verbose: bool = False,
        max_total_size_gb: float | None = None,
    ) -> None:
        super().__init__(
            max_total_size_gb=max_total_size_gb,
            dirpath=dirpath,
            filename=filename,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_last=save_last,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            save_weights_only=save_weights_only,
            auto_insert_metric_name=auto_insert_metric_name,
            verbose=verbose,
            # a metric of the validation at the end of an epoch is not there before it
            save_on_train_epoch_end=None if monitor is None else False,
        )
        self._waits_for_validation = False
        self._step = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        with warnings.catch_warnings():
            # whether the run goes on, and is right to find checkpoints, shows at its start
            warnings.filterwarnings("ignore", message="Checkpoint directory .* is not empty")
            super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._step = trainer.global_step
        folder = Path(str(self.dirpath))
        if trainer.is_global_zero and trainer.global_step == 0 and any(folder.glob("*.ckpt")):
            rank_zero_warn(
                f"{folder} holds checkpoints of an earlier run, and this one starts from the "
                "beginning beside them; resume with --ckpt_path last, or choose another dirpath"
            )

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "waits_for_validation": self._waits_for_validation}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._waits_for_validation = bool(state_dict.get("waits_for_validation", False))

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == self._step:
            return  # a batch that only accumulated gradients, which no checkpoint holds
        self._step = trainer.global_step
        due = self._step_is_due(trainer) or self._time_is_due(trainer)
        if not due or self._should_skip_saving_checkpoint(trainer):
            return
        metrics = self._monitor_candidates(trainer)
        if self.monitor is not None and self._is_measured_in_validation(trainer, metrics):
            self._waits_for_validation = True
        else:
            self._save_topk_checkpoint(trainer, metrics)
        self._save_last_checkpoint(trainer, metrics)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if not (self._waits_for_validation and fitting):
            super().on_validation_end(trainer, pl_module)
            if self._every_n_epochs >= 1:
                self._keep_last(trainer)
            return
        self._waits_for_validation = False
        metrics = self._monitor_candidates(trainer)
        self._save_topk_checkpoint(trainer, metrics)
        # again, so that it knows of the ranking
        self._save_last_checkpoint(trainer, metrics)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # the steps since the last trigger
        self._keep_last(trainer)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        # any other one may come in the middle of a step; of several ranks `Termination` takes care
        if isinstance(exception, SIGTERMException) and trainer.world_size == 1:
            self._keep_last(trainer)

    def save_on_termination(self, trainer: L.Trainer) -> None:
        self._keep_last(trainer)

    def _keep_last(self, trainer: L.Trainer) -> None:
        """Save ``last.ckpt`` unless this step has been saved, by this process or the one before."""
        if trainer.global_step == self._continued_at:
            return
        if self.save_last and not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def _step_is_due(self, trainer: L.Trainer) -> bool:
        every = self._every_n_train_steps
        return every >= 1 and trainer.global_step % every == 0

    def _time_is_due(self, trainer: L.Trainer) -> bool:
        if self._train_time_interval is None or self._last_time_checked is None:
            return False
        now = time.monotonic()
        late = now - self._last_time_checked >= self._train_time_interval.total_seconds()
        # the clocks of the ranks differ: rank zero decides
        if not trainer.strategy.broadcast(late):
            return False
        self._last_time_checked = now
        return True

    def _is_measured_in_validation(self, trainer: L.Trainer, metrics: dict[str, Any]) -> bool:
        """Tell whether the value at hand, if any, belongs to older weights."""
        if self.monitor not in metrics:
            return True
        logged = trainer.fit_loop.epoch_loop.val_loop._results.values()
        return any(result.meta.name == self.monitor for result in logged)
