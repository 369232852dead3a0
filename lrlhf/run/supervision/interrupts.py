"""A trainer that can be stopped and started again in one process, as notebooks do.

Lightning ends an interrupted fit with ``SystemExit``, leaves SIGINT ignored where it came early,
and calls no ``teardown``: the session is over, or has lost its stop button, models are in the mode
of a validation, and engines still hold their memory.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lrlhf.run.quiet_output import quiet
from lrlhf.run.supervision.signals import Terminated

R = TypeVar("R")

_logger = logging.getLogger(__name__)


class Interrupted(KeyboardInterrupt):
    """The user stopped a trainer, which has cleaned up; says how to go on."""


def _usable_afterwards(run: Callable[..., R]) -> Callable[..., R]:
    """Have one of a trainer's entry points leave process and module usable, however it ends."""
    signature = inspect.signature(run)

    @functools.wraps(run)
    def running(self: L.Trainer, *args: Any, **options: Any) -> R:
        given = signature.bind(self, *args, **options).arguments
        with quiet(), _put_back(self, given.get("model")):
            if run.__name__ == "fit" and given.get("ckpt_path") is None and self.global_step > 0:
                _logger.info("%s", _what_another_fit_does(self))
            return run(self, *args, **options)

    return running


class ReusableTrainer(L.Trainer):
    """Lightning's trainer, quieter, and of further use after an interrupt or an error.

    An interrupt, after the step or in the middle of it, comes out as `Interrupted`, which is a
    ``KeyboardInterrupt``. A second ``fit`` goes on with the steps up to ``max_steps``, which can be
    raised for it.
    """

    fit = _usable_afterwards(L.Trainer.fit)
    validate = _usable_afterwards(L.Trainer.validate)
    test = _usable_afterwards(L.Trainer.test)
    predict = _usable_afterwards(L.Trainer.predict)

    def __repr__(self) -> str:
        if "fit_loop" not in vars(self):  # Lightning looks at it while it is built
            return f"{type(self).__name__}(...)"
        limit = "" if self.max_steps < 0 else f" of {self.max_steps}"
        callbacks: list[L.Callback] = self.callbacks  # type: ignore[attr-defined]
        return (
            f"{type(self).__name__}({self.global_step}{limit} steps done, "
            f"{type(self.strategy).__name__} on {self.strategy.root_device}, {self.precision}, in "
            f"{self.default_root_dir})\n"
            f"  callbacks: {', '.join(type(callback).__name__ for callback in callbacks)}\n"
            f"  loggers: {', '.join(type(logger).__name__ for logger in self.loggers) or 'none'}"
        )

    @property
    def max_steps(self) -> int:
        """Steps after which ``fit`` ends; -1: it is not steps that end it."""
        return self.fit_loop.epoch_loop.max_steps

    @max_steps.setter
    def max_steps(self, steps: int) -> None:
        self.fit_loop.epoch_loop.max_steps = steps


@contextlib.contextmanager
def _put_back(trainer: L.Trainer, model: L.LightningModule | None) -> Iterator[None]:
    modes = {} if model is None else {part: part.training for part in model.modules()}
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except BaseException as error:
        # first, so that a second interrupt gets through what follows
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGINT, handler)
        for part, training in modes.items():
            part.training = training
        stage, trainer.state.stage = trainer.state.fn, None
        if model is not None and stage is not None:
            try:
                model.zero_grad()
                model.teardown(stage.value)  # it may hold an engine
            except Exception:  # the one that ended the run is what the user has to know
                _logger.warning("teardown of %s failed too", type(model).__name__, exc_info=True)
        if _is_interrupt(error):
            raise Interrupted(_how_to_go_on(trainer)) from None
        raise


def _is_interrupt(error: BaseException) -> bool:
    """Tell whether the user has ended a run: after a step, or within one as Lightning says it."""
    if isinstance(error, Terminated):
        return error.interrupted
    return isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt)


def _how_to_go_on(trainer: L.Trainer) -> str:
    if trainer.state.fn != "fit":
        return "interrupted"
    step, path = trainer.global_step, checkpoint_to_continue(trainer)
    exact = path and f', fit(..., ckpt_path="last") from the state saved in {path}'
    return (
        f"interrupted after step {step}: fit(...) goes on with the weights as they are{exact or ''}"
    )


def checkpoint_to_continue(trainer: L.Trainer) -> Path | None:
    """Return the newest checkpoint that a fit has saved; None: it has saved none."""
    for saver in trainer.checkpoint_callbacks:
        if isinstance(saver, ModelCheckpoint):
            newest = "" if saver.monitor else saver.best_model_path
            path = saver.last_model_path or newest
            if path and Path(path).exists():
                return Path(path)
    return None


def _what_another_fit_does(trainer: L.Trainer) -> str:
    progress: Any = trainer.fit_loop.epoch_progress.current
    step, epochs = trainer.global_step, progress.processed
    if 0 <= trainer.max_steps <= step:
        return f"all {step} steps of this trainer are done: raise trainer.max_steps for more"
    if 0 < (trainer.max_epochs or 0) <= epochs:
        return (
            f"all {epochs} epochs of this trainer are done: raise trainer.fit_loop.max_epochs for "
            "more"
        )
    return (
        f"fit goes on after step {step} with the weights as they are and a new optimizer; "
        'fit(..., ckpt_path="last") restores the optimizer too'
    )
