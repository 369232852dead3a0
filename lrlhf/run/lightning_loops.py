"""Changes of Lightning's loops: what a step is, and where a resumed run goes on.

They use private parts of Lightning, see `lrlhf.run.lightning_internals`.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import lightning as L
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.training_epoch_loop import RestartStage, _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _ResultCollection,
    _ResultMetric,
)
from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from lrlhf.run.checkpoints.checkpoint_reader import NotACheckpointError
from lrlhf.run.seeding import is_last_step
from lrlhf.torch_internals import counts_steps_alone, set_steps, steps_of

# ---------------------------------------------------------------- what a step is


class _StepPerIteration(_ManualOptimization):
    def on_run_start(self) -> None:
        """Leave the optimizers uncounted."""

    def advance(self, kwargs: OrderedDict[str, Any]) -> None:
        self.optim_step_progress.increment_ready()
        super().advance(kwargs)
        self.optim_step_progress.increment_completed()


def count_iterations_as_steps(trainer: L.Trainer) -> None:
    """Make ``trainer.global_step`` the number of finished training steps.

    Under manual optimization Lightning counts every ``optimizer.step()`` as a global step, so with
    several optimizers, epochs or minibatches a step count means nothing to the user, ``max_steps``
    overshoots and checkpoint intervals are missed. Call it from ``setup("fit")``, which runs before
    the state of the loops is restored, so that a resumed run counts on.
    """
    loop = trainer.fit_loop.epoch_loop
    if not isinstance(loop.manual_optimization, _StepPerIteration):  # else it counts on
        loop.manual_optimization = _StepPerIteration(trainer)


# ---------------------------------------------------------------- what a step logs


class _LoggedValue(_ResultMetric):
    def to(self, *args: Any, **kwargs: Any) -> Self:
        value = getattr(self, "value", None)  # a metric that was logged is not there at first
        if not isinstance(value, Tensor) or args != (value.device,) or kwargs:
            super().to(*args, **kwargs)
        return self


class _LoggedValues(_ResultCollection):
    def __setitem__(self, key: str, metric: _ResultMetric) -> None:
        metric.__class__ = _LoggedValue
        super().__setitem__(key, metric)


def log_without_copies(trainer: L.Trainer) -> None:
    """Make ``self.log`` of a training step leave what it logs where it is.

    Lightning moves a value to its own device each time that the value is logged, and copies all
    that describes it on the way: a tenth of a step of 0.1 s. Call it from ``setup("fit")``.
    """
    loop = trainer.fit_loop.epoch_loop
    if not isinstance(loop._results, _LoggedValues):
        loop._results = _LoggedValues(training=True)


# ---------------------------------------------------------------- where a resumed run goes on


class NoProgressError(RuntimeError):
    """The run has steps left, but its data yields no batch."""


class _ResumedEpochLoop(_TrainingEpochLoop):
    """Does what was left of the last step first: validation, and the counting of the step.

    Lightning takes a checkpoint that a callback makes at the end of a step for one of the whole
    step: the validation that was to follow, and the end of the epoch or of the run, are left out.

    The last step of a run is followed by a validation, whatever the interval is.
    """

    finishes_step = False

    def update_restart_stage(self) -> None:
        super().update_restart_stage()
        self.finishes_step = False
        if not self.trainer.fit_loop.restarted_mid_epoch:
            return
        validated = False
        if self.restarted_on_train_batch_end:
            # the step is done but for this; Lightning would count the validation as done too
            self.batch_progress.increment_completed()
            self._restart_stage = RestartStage.RESTARTED_ON_LAST
        elif self.restarted_on_last:
            validation = self.val_loop.batch_progress
            all_counted = validation.current.completed == validation.current.ready
            validated = validation.is_last_batch and all_counted
        else:
            return
        self.finishes_step = True
        self._skip_next_val = validated

    @property
    def done(self) -> bool:
        return not self.finishes_step and super().done

    def advance(self, data_fetcher: _DataFetcher) -> None:
        if not self.finishes_step:
            self._restarting = False  # nothing is left of an earlier step
            super().advance(data_fetcher)

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        if self.finishes_step:
            self.finishes_step = False
            # one that was broken off starts anew: what it had gathered is gone
            self.val_loop.restarting = False
        super().on_advance_end(data_fetcher)

    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        fit = self.trainer.fit_loop
        ends = is_last_step(self.trainer) or (self.trainer.should_stop and fit._can_stop_early)
        last = ends and self.trainer.enable_validation
        return last or super()._should_check_val_fx(data_fetcher)


class _ResumedFitLoop(_FitLoop):
    """Runs, after a resume, also where only the end of a step, an epoch or the run is left."""

    epoch_loop: _ResumedEpochLoop

    @property
    def skip(self) -> bool:
        if self._loaded_from_state_dict and self.max_batches != 0:
            return bool(self.trainer.limit_train_batches == 0)
        return super().skip

    @property
    def done(self) -> bool:
        return not self.epoch_loop.finishes_step and super().done

    def reset(self) -> None:
        epochs = self.epoch_progress.total
        ended = self._loaded_from_state_dict and epochs.ready == epochs.completed
        super().reset()
        if self.restarted_on_epoch_end:
            # Lightning would end the epoch a second time
            self.epoch_progress.increment_completed()
        elif not ended:
            return
        self.reset_restart_stage()
        if self.epoch_loop.batch_progress.is_last_batch:
            self._resuming_from_checkpoint = False
            self.epoch_loop.restarting = False

    def _load_combined_loader_states(self) -> None:
        # Lightning leaves the position in the data where it is after the end of an epoch, and the
        # first epoch comes again
        states = self._combined_loader_states_to_load
        if states and self._combined_loader is not None:
            self._combined_loader._load_state_dicts(states)
            self._combined_loader_states_to_load = []

    def advance(self) -> None:
        loop = self.epoch_loop
        trained = loop.batch_progress.total.ready
        may_be_empty = loop.finishes_step
        super().advance()
        if may_be_empty or self.trainer.should_stop:
            return
        if loop.batch_progress.total.ready == trained:
            raise NoProgressError(
                f"the training data gave no batch in epoch {self.trainer.current_epoch}, after "
                f"step {self.trainer.global_step} (max_steps: {self.max_steps}): a data loader "
                "must begin anew when it is iterated again, also after load_state_dict()"
            )

    def run(self) -> None:
        super().run()
        self._loaded_from_state_dict = False


def resume_where_it_stopped(trainer: L.Trainer) -> None:
    """Make a resumed run skip nothing; call it from ``setup("fit")``."""
    trainer.fit_loop.__class__ = _ResumedFitLoop
    trainer.fit_loop.epoch_loop.__class__ = _ResumedEpochLoop
    # the number of log rows; an interrupt may have come before the last step was added
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step
    connector = trainer._checkpoint_connector
    connector.restore_training_state = partial(  # type: ignore[method-assign]
        _restore_training_state, connector
    )


def _restore_training_state(connector: _CheckpointConnector) -> None:
    stored: dict[str, Any] = connector._loaded_checkpoint
    if stored and connector.trainer.state.fn == "fit" and "optimizer_states" not in stored:
        raise NotACheckpointError(
            f"{connector._ckpt_path} holds weights only (save_weights_only), from which no run can "
            "go on: lrlhf export writes its model, from which a new run can start"
        )
    schedules = [*_schedules_at(connector.trainer, (stored or {}).get("lr_schedulers", ()))]
    _CheckpointConnector.restore_training_state(connector)
    for scheduler, state, groups in schedules:
        scheduler.load_state_dict(state)
        for group, options in zip(scheduler.optimizer.param_groups, groups, strict=True):
            group.update(options)


_SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
"""Options of parameter groups that belong to a schedule."""


def _schedules_at(
    trainer: L.Trainer, stored: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[LRScheduler, dict[str, Any], list[dict[str, Any]]]]:
    """Take the schedules of this run to the step of a checkpoint.

    A checkpoint holds the rate of its next step, and of most schedules also where they end, as they
    were in the run that wrote it. This run may be longer, or have another peak.

    Yields:
        Schedules, their states, and the options that they gave to the groups of their optimizers.
    """
    for config, state in zip(trainer.lr_scheduler_configs, stored, strict=False):
        scheduler: Any = config.scheduler
        if not counts_steps_alone(scheduler):
            continue
        steps = steps_of(state)
        if type(scheduler) is lr_scheduler.LambdaLR and steps:
            # the one kind that is sure not to need the steps between
            set_steps(scheduler, steps)
            steps = 1
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler")
            for _ in range(steps):
                scheduler.step()
        cycled = ("momentum", "betas") if vars(scheduler).get("cycle_momentum") else ()
        groups = [
            {key: group[key] for key in (*_SCHEDULED, *cycled) if key in group}
            for group in scheduler.optimizer.param_groups
        ]
        yield scheduler, *copy.deepcopy((scheduler.state_dict(), groups))
