"""SIGTERM, as schedulers send it, and Ctrl-C: every rank ends after the same step, and saves.

Lightning calls a collective inside its signal handler. When the signal reaches all ranks, as it
does from SLURM, Kubernetes or torchrun, each handler waits for collectives that the others are
in, and the run hangs until it is killed. Here a handler only takes a note and passes the signal
on; the ranks compare their notes after each step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing.spawn import ProcessExitedException

from lrlhf.run.collectives import Collectives
from lrlhf.run.lightning_internals import (
    Launcher,
    at_teardown,
    end_loops_early,
    is_forking,
    replace_signal_handlers,
    waits_for_others,
)
from lrlhf.run.quiet_output import quiet
from lrlhf.run.seeding import is_last_step

STATUS: Final = 128 + signal.SIGTERM
"""Exit status of a process that ended because it was asked to."""

_logger = logging.getLogger(__name__)


class Terminated(SIGTERMException):
    """The run was asked to end, and all ranks do so here; a script that lets it pass exits 143.

    Args:
        interrupted: By Ctrl-C; the exit status is 130.
    """

    def __init__(self, *, interrupted: bool = False) -> None:
        self.interrupted = interrupted
        super().__init__(128 + signal.SIGINT if interrupted else STATUS)


class LostProcessError(RuntimeError):
    """Another process of the run ended or did not answer."""


class SavesOnTermination(ABC):
    """What callbacks derive from that save when a run is asked to end."""

    @abstractmethod
    def save_on_termination(self, trainer: L.Trainer) -> None:
        """Save; called on all ranks, after the last step and its callbacks."""


class Termination(L.Callback):
    """Ends a run after the step in which any of its ranks was asked to.

    The running step is finished and the callbacks hear of it, `RLCheckpoint` saves, and
    `Terminated` is raised on all ranks. With accumulated gradients the step is the optimizer's. A
    validation of one process ends early, one of several is finished first. A run that has its last
    step behind it ends as if nobody had asked.

    Ctrl-C does the same while training goes on, and a second one ends the run where it is.

    SLURM's requeue signal waits for the end of the step in the same way, and is then answered as
    Lightning does: by a checkpoint that the requeued job finds by itself.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        # forked processes do not tell callbacks of an exception
        self._alone = trainer.world_size == 1 and not is_forking(trainer.strategy.launcher)
        self._ending = False
        self._interrupted = False
        self._before: Any = None
        """What answered Ctrl-C before training; None: still does."""
        self._requeue_signal = 0
        self._step = trainer.global_step
        self._accumulates = False
        self._requeue = replace_signal_handlers(
            trainer, self._note_signal, self._note_requeue_signal
        )
        at_teardown(trainer, self._leave_ctrl_c)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ending = self._interrupted = False  # of a fit that has ended

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        before = signal.getsignal(signal.SIGINT)
        # ignored where a script has put the run in the background; None cannot be put back
        if self._before or before in {signal.SIG_IGN, None}:
            return
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._answer_ctrl_c)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._leave_ctrl_c()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        # a checkpoint between two optimizer steps would lose what was accumulated
        self._accumulates = pl_module.automatic_optimization and trainer.global_step == self._step
        self._step = trainer.global_step
        if not self._accumulates:
            self._compare_notes(trainer)

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        # of a validation in which no other rank goes on
        early = self._alone and not self._accumulates and not is_last_step(trainer)
        if self._ending and early and trainer.validating:
            raise Terminated(interrupted=self._interrupted)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and not self._accumulates:
            self._compare_notes(trainer)

    def _note_signal(self, signum: int, _: FrameType | None) -> None:
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self._ending:
            launcher.kill(signum)
        self._ending = True

    def _answer_ctrl_c(self, signum: int, frame: FrameType | None) -> None:
        if self._ending:
            signal.default_int_handler(signum, frame)
        self._ending = self._interrupted = True
        if self._trainer.is_global_zero:
            # not by a logger, whose lock may be held where this comes between
            text = "\nCtrl-C: this step is finished and saved; once more ends the run at once\n"
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())

    def _leave_ctrl_c(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def _note_requeue_signal(self, signum: int, _: FrameType | None) -> None:
        self._requeue_signal = signum

    def _compare_notes(self, trainer: L.Trainer) -> None:
        notes = [float(self._ending), float(self._interrupted), float(self._requeue_signal)]
        own = torch.tensor(notes, device=trainer.strategy.root_device)
        ending, interrupted, requeue = Collectives(trainer).max(own).tolist()
        if requeue:
            self._requeue_signal = 0
            self._requeue(signal.Signals(int(requeue)), None)
        if ending:
            self._ending = True
            over = is_last_step(trainer)
            if trainer.is_global_zero:
                and_now = "; what comes after the steps goes on" if over else ""
                _logger.info("asked to end: step %d was the last%s", trainer.global_step, and_now)
            callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
            for callback in callbacks:
                if isinstance(callback, SavesOnTermination):
                    callback.save_on_termination(trainer)
            if not over:
                end_loops_early(trainer)
                raise Terminated(interrupted=bool(interrupted))


@contextlib.contextmanager
def answering_sigterm(launcher: Launcher | None) -> Iterator[None]:
    """End well on a SIGTERM that comes while no trainer listens.

    That is the case before training starts and after it has ended, and all the time in a process
    that only waits for those that it has forked. What was launched gets the signal too.

    Raises:
        Terminated: The run was asked to end.
        LostProcessError: A process that was forked ended without an error of its own.
    """
    waited = False

    def answer(signum: int, _: FrameType | None) -> None:
        nonlocal waited
        # the trainer's handler calls the one that it replaced: then there is nothing to do
        if signal.getsignal(signum) is not answer:
            return
        if launcher is not None:
            launcher.kill(signum)
        waited = waits_for_others(launcher)
        if not waited:  # else they save, and this process hears how they ended
            raise Terminated

    before = signal.signal(signal.SIGTERM, answer)
    try:
        yield
    except ProcessExitedException as error:
        if waited or error.exit_code == STATUS:
            raise Terminated from error
        raise LostProcessError(
            f"{error}; its own last lines say why, and --ckpt_path last continues"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, before)


R = TypeVar("R")


class Interrupted(KeyboardInterrupt):
    """The user stopped a trainer, which has cleaned up; says how to go on."""


def _usable_afterwards(run: Callable[..., R]) -> Callable[..., R]:
    """Have one of a trainer's entry points leave process and module usable, however it ends."""
    signature = inspect.signature(run)

    @functools.wraps(run)
    def running(self: L.Trainer, *args: Any, **options: Any) -> R:
        call = signature.bind(self, *args, **options).arguments
        with quiet(), _put_back(self, call.get("model")):
            if run.__name__ == "fit" and call.get("ckpt_path") is None and self.global_step > 0:
                _logger.info("%s", _next_fit_sentence(self))
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
            raise Interrupted(_continuation_sentence(trainer)) from None
        raise


def _is_interrupt(error: BaseException) -> bool:
    """Tell whether the user has ended a run: after a step, or within one as Lightning says it."""
    if isinstance(error, Terminated):
        return error.interrupted
    return isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt)


def _continuation_sentence(trainer: L.Trainer) -> str:
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


def _next_fit_sentence(trainer: L.Trainer) -> str:
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
