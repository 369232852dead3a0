"""The rows of a run's logs belong to its checkpoints: none missing, none twice after a resume.

Lightning writes the row of a step after the callbacks of that step, the one that saves included.
So a checkpoint of twelve steps is older than the twelfth row, and a run that is killed there never
writes it. Here the checkpoint carries that row, and how far each log was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
from jsonargparse import Namespace
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lrlhf.run.lightning_internals import forget_last_step, next_log_row, number_log_rows
from lrlhf.run.run_folder import hold_folder
from lrlhf.run.seeding import LoadedStep
from lrlhf.run.supervision.signals import Terminated
from lrlhf.secrets import HIDDEN, hide, is_secret_name

_KEY = "log_rows"


@runtime_checkable
class ResumableLog(Protocol):
    """A logger whose rows a checkpoint can be sure of; all is called on rank zero only."""

    def log_position(self) -> dict[str, Any]:
        """Bring all rows to the disk and say how far they go, in plain values."""

    def rewind(self, position: Mapping[str, Any]) -> None:
        """Remove the rows after a position, from which a run goes on."""

    def start_run(self) -> None:
        """Begin a run, and keep the rows of an earlier one under another name."""

    def for_stage(self, stage: str) -> Logger:
        """Return a logger for an evaluation by itself, whose rows are apart from the training's."""


class LogRows(LoadedStep):
    """Keeps the positions of the loggers, and the row that is about to be written, in checkpoints.

    It is the first of the callbacks, as rows that others write at the start would be lost else. An
    evaluation before training, which Lightning takes for a check of the code and does not log,
    becomes the row of step 0.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None
        self._before_training: dict[str, Any] = {}
        self._row_follows = False
        self._training_logs: dict[Logger, Logger] = {}
        """The loggers of the training, by those that an evaluation has in their place."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._loaded = None
        number_log_rows(trainer)
        trainer.loggers = [self._training_logs.get(log, log) for log in trainer.loggers]
        if stage == "fit":
            hold_log_folders(trainer)
        elif trainer.is_global_zero:
            apart = {log: log.for_stage(TrainerFn(stage).value) for log in _resumable(trainer)}
            trainer.loggers = [apart.get(log, log) for log in trainer.loggers]
            self._training_logs = {log: training for training, log in apart.items()}

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        self._loaded = checkpoint.get(_KEY, {"logs": [], "row": None})

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # on all ranks: a metric of an epoch may be reduced over them when it is read
        row = self._next_row(trainer)
        logs = _resumable(trainer) if trainer.is_global_zero else ()
        positions = [(type(log).__name__, log.log_position()) for log in logs]
        checkpoint[_KEY] = {"logs": positions, "row": row}

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.num_sanity_val_batches == trainer.num_val_batches:
            # on all ranks, as a metric may be reduced over them when it is read
            self._before_training = convert_tensors_to_scalars(trainer.logged_metrics)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        loaded, self._loaded = self._loaded, None
        before, self._before_training = self._before_training, {}
        self._row_follows = False
        if not trainer.is_global_zero:
            return
        if loaded is not None:
            _resume(trainer, loaded)
        elif trainer.global_step == 0:
            for log in _resumable(trainer):
                log.start_run()
            if before:
                _write(trainer, {"epoch": trainer.current_epoch, **before}, 0)

    # ---- when a row follows

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._row_follows = False
        forget_last_step(trainer)

    def on_train_batch_end(self, *_: Any) -> None:
        self._row_follows = True

    def on_validation_start(self, *_: Any) -> None:
        self._row_follows = False

    def on_train_epoch_end(self, *_: Any) -> None:
        self._row_follows = True

    def on_train_end(self, *_: Any) -> None:
        self._row_follows = False

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        # all ranks end after the same step, and a fit without a checkpoint goes on after it
        if not isinstance(exception, Terminated) or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        row, self._row_follows = self._next_row(trainer), False
        if row is not None:
            _write(trainer, row["metrics"], row["step"])

    def _next_row(self, trainer: L.Trainer) -> dict[str, Any] | None:
        """What Lightning writes when the callbacks are done, if they run where it does."""
        row = next_log_row(trainer) if self._row_follows else None
        if row is None:
            return None
        metrics: dict[str, Any] = convert_tensors_to_scalars(row[0])
        if not metrics:
            return None
        if "step" not in metrics:
            metrics.setdefault("epoch", trainer.current_epoch)
        return {"metrics": metrics, "step": int(metrics.pop("step", row[1]))}


def keep_log_rows(trainer: L.Trainer, stage: str) -> None:
    """Have the logs of a trainer be those of one run, however often it is interrupted.

    Call it when a run is set up, on every rank; a second call changes nothing.
    """
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if not any(isinstance(callback, LogRows) for callback in callbacks):
        callbacks.insert(0, LogRows())
        callbacks[0].setup(trainer, trainer.lightning_module, stage)


def hold_log_folders(trainer: L.Trainer) -> None:
    """Refuse a training run whose logs another one writes; see `hold_folder`."""
    for log in _resumable(trainer):
        hold_folder(trainer, Path(log.log_dir or log.save_dir or "."))


def _resumable(trainer: L.Trainer) -> Iterator[Any]:
    # fast_dev_run has a logger that answers every question
    loggers: list[Logger] = [] if trainer.fast_dev_run else trainer.loggers  # type: ignore[attr-defined]
    return (logger for logger in loggers if isinstance(logger, ResumableLog))


def _write(trainer: L.Trainer, metrics: dict[str, Any], step: int) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=step)
        logger.save()


def _resume(trainer: L.Trainer, loaded: Mapping[str, Any]) -> None:
    positions = list(loaded["logs"])
    for log in _resumable(trainer):
        name = type(log).__name__
        # the first of its class that no logger before it took
        position = next((entry for entry in positions if entry[0] == name), None)
        if position is None:
            rank_zero_info(f"{name}: the checkpoint knows of no such log; it begins here")
            log.start_run()
            continue
        positions.remove(position)
        log.rewind(position[1])
        row = loaded["row"]
        if row is not None:
            log.log_metrics(row["metrics"], step=row["step"])


def without_secrets(value: Any, *, secret: bool = False) -> Any:
    """Copy a config, with ``***`` for the secrets in it.

    Args:
        value: Mappings, namespaces and lists are gone through; other objects stay what they are.
        secret: Whether the whole value stands under the name of a secret.
    """
    if isinstance(value, Namespace):
        items = without_secrets(vars(value), secret=secret)
        return Namespace(**items)  # type: ignore[no-untyped-call]
    if isinstance(value, Mapping):
        items = {
            key: without_secrets(
                part, secret=(secret or is_secret_name(str(key))) and key != "class_path"
            )
            for key, part in value.items()
        }
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if type(value) in (list, tuple):
        return type(value)(without_secrets(item, secret=secret) for item in value)
    # digits alone are a number in YAML; a short one is no password
    long_number = isinstance(value, int) and value > 99_999
    if secret and value and (isinstance(value, str) or long_number):
        return HIDDEN
    return hide(value) if isinstance(value, str) else value
