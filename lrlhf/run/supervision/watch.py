"""A run knows what it is doing, ends when that takes too long, and its processes end together.

A process that is gone leaves the others in a collective: over gloo they notice at once, over NCCL
after the timeout of the process group, which is half an hour, and neither says where that was.

A phase that hangs costs as much as training does, and says nothing: `faulthandler` writes down
where every thread is, `DeadlineError` is raised in the main thread, so that engines, servers and
loaders close, and the process is ended where that is in vain because the main thread waits in C.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, Final, ParamSpec, TypeVar

import lightning as L
import psutil
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lrlhf.arguments import KeepsArguments
from lrlhf.process_guard import descendants, send_signal
from lrlhf.rollout import RolloutListener
from lrlhf.run.lightning_internals import (
    at_teardown,
    is_forking,
    launched_processes,
    process_group_timeout,
    retire_observer,
)
from lrlhf.run.run_folder import run_folder
from lrlhf.run.supervision.signals import STATUS, LostProcessError, Termination

_HOUR = 3600.0
_STDERR: Final = 2
_CHILDREN_S = 5.0
_KEYS = {"set-up": "setup", "saving": "save", "loading": "load", "between phases": "train"}


class DeadlineError(Exception):
    """A phase took longer than its deadline.

    No `RuntimeError`, because readers of images and clients of engines take those for their own.
    """


class Deadlines(KeepsArguments, L.Callback):
    """Changes the deadlines of the phases of a run.

    Every run has deadlines; this callback changes them. The defaults are for hangs, not for
    slowness: several times what the phase takes in the largest runs that we know of. A phase that
    takes longer at a stretch ends the run with exit status 1: the message names phase, iteration
    and rank, and where every thread of the process was stands in ``stacks_rank<rank>.txt`` in the
    folder of the run. Time in which another phase runs inside a phase, the process is stopped or
    the machine sleeps does not count. All values are seconds; null means none.

    Args:
        setup: From the start of fit to the first batch, with the models that the module loads.
        load: Reading a checkpoint.
        data: Waiting for one batch.
        sync: Bringing an engine its weights.
        generate: Generating the responses of an iteration, or of a batch of a validation.
        reward: Scoring them.
        logprob: Log-probabilities and values of an iteration.
        update: The optimizer steps of an iteration.
        train: The rest of a training step; all of it where a module has no phases.
        validation: A batch of a validation, without its responses and rewards.
        save: Writing a checkpoint.
        end: After the last batch: exports and reports.
        grace: From the error to the end of the process by force, where the error does not end it.

    Raises:
        ValueError: A value is not above 0.
    """

    def __init__(  # noqa: PLR0913  the keys of a user's config
        self,
        setup: float | None = 4 * _HOUR,
        load: float | None = 2 * _HOUR,
        data: float | None = 1 * _HOUR,
        sync: float | None = 1 * _HOUR,
        generate: float | None = 4 * _HOUR,
        reward: float | None = 2 * _HOUR,
        logprob: float | None = 2 * _HOUR,
        update: float | None = 4 * _HOUR,
        train: float | None = 2 * _HOUR,
        validation: float | None = 2 * _HOUR,
        save: float | None = 2 * _HOUR,
        end: float | None = 4 * _HOUR,
        grace: float = 60.0,
    ) -> None:
        self.grace = grace
        self.seconds: dict[str, float | None] = {
            **{"setup": setup, "load": load, "data": data, "sync": sync, "generate": generate},
            **{"reward": reward, "logprob": logprob, "update": update, "train": train},
            **{"validation": validation, "save": save, "end": end},
        }
        for name, value in {**self.seconds, "grace": grace}.items():
            if value is not None and not 0 < value < math.inf:
                none = "" if name == "grace" else ", or null for none"
                raise ValueError(f"deadline {name} is {value}; give seconds above 0{none}")

    def of(self, phase: str) -> tuple[str, float | None]:
        """Return the option that holds the deadline of a phase, and its seconds."""
        key = _KEYS.get(phase, phase)
        key = key if key in self.seconds else "train"
        return key, self.seconds[key]


class PhaseClock:
    """Which phase this is, and how many seconds it has used.

    Phases nest: while an inner one runs, the outer one stands still.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phase, self._seconds = "set-up", 0.0
        self._outer: list[tuple[str, float]] = []

    def enter(self, phase: str) -> None:
        """Begin a phase, which ends the one before."""
        with self._lock:
            self._phase, self._seconds = phase, 0.0

    @contextlib.contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Be in another phase for a while."""
        with self._lock:
            self._outer.append((self._phase, self._seconds))
            self._phase, self._seconds = phase, 0.0
        try:
            yield
        finally:
            with self._lock:
                self._phase, self._seconds = self._outer.pop()

    def tick(self, seconds: float) -> tuple[str, float]:
        """Add to the phase; returns it, and the seconds that it has used."""
        with self._lock:
            self._seconds += seconds
            return self._phase, self._seconds


def write_stacks(path: Path, reason: str) -> str:
    """Write where every thread is to stderr and to a file; returns where that can be read."""
    _write(f"{reason}; the threads of this process are at\n")
    faulthandler.dump_traceback(_STDERR)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as handle:
            handle.write(f"{now} process {os.getpid()}: {reason}\n".encode())
            faulthandler.dump_traceback(handle)
            handle.write(b"\n")
    except OSError as error:
        return f"the stacks above (no file of them: {error})"
    return str(path)


def end_process(reason: str, *, spare: Collection[int] = ()) -> None:
    """End this process from a thread, with the status and the line of an error.

    What it started, and what that has started, goes first: it would keep pipes open. Those to
    ``spare``, such as other ranks, end by themselves.
    """
    deadline = time.monotonic() + _CHILDREN_S
    send_signal(_descendants(spare), signal.SIGTERM)
    while (left := _descendants(spare)) and time.monotonic() < deadline:
        time.sleep(0.05)
    send_signal(left, signal.SIGKILL)
    _write(f"error: {reason}\n")
    os._exit(1)


def _descendants(spare: Collection[int]) -> list[psutil.Process]:
    spared = {*spare, *(process.pid for pid in spare for process in descendants(pid))}
    return [process for process in descendants(os.getpid()) if process.pid not in spared]


def _write(text: str) -> None:
    # not through sys.stderr: a thread that is stuck may hold its lock
    with contextlib.suppress(OSError):
        os.write(_STDERR, text.encode(errors="replace"))


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # M_TRIM_THRESHOLD… of malloc.h
_NEVER = -1
_KEEP = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER))
"""All blocks come from the heap, and its end stays with the process."""
_RETURN = ((_MMAP_MAX, 2**16), (_MMAP_THRESHOLD, 2**25), (_TRIM_THRESHOLD, 2**26))
"""What glibc comes to by itself after a few large blocks (64-bit)."""

_kept = False


def keep_host_memory() -> bool:
    """Let this process keep the memory that a micro-batch frees, where its C library is glibc.

    By default glibc returns the end of its heap to the system as soon as 64 MB of it are free, and
    at once every block of 32 MB or more, and the next micro-batch waits for the system to clear
    each page again. Settings of the user (``MALLOC_*``, ``GLIBC_TUNABLES``) win. Returns whether it
    was set.
    """
    global _kept
    chosen = any(
        name.startswith("MALLOC_") or (name == "GLIBC_TUNABLES" and "malloc" in value)
        for name, value in os.environ.items()
    )
    if chosen:
        return False
    _kept = _set(_KEEP)
    return _kept


def return_host_memory() -> None:
    """Give what is free back to the system after a fit, for a notebook that goes on."""
    global _kept
    if _kept:
        _set(_RETURN)
        _of_glibc("malloc_trim")(ctypes.c_size_t(0))
        _kept = False


def _set(options: tuple[tuple[int, int], ...]) -> bool:
    mallopt = _of_glibc("mallopt")
    return mallopt is not None and all(mallopt(*option) == 1 for option in options)


def _of_glibc(name: str) -> Any:
    """Return a function that glibc has and others, such as musl and macOS's, have not, or None."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None


P = ParamSpec("P")
R = TypeVar("R")

_INTERRUPT: Final = signal.SIGURG
"""Ignored by every process that does not ask for it, and used by no library of ours."""

_logger = logging.getLogger(__name__)

# gloo's own errors mostly name the file they come from, but not all
_NETWORK = re.compile(
    r"\b(gloo|nccl)\b|pair closure|(send|recv) operation to complete", re.IGNORECASE
)
# what gloo, NCCL and the store say of a process that is gone or silent
_SILENT = re.compile(r"time[d ]*-?out", re.IGNORECASE)
_GONE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exited|socket closed"
    r"|closing connection|connection was closed|communicator was aborted|aborted communicator",
    re.IGNORECASE,
)


def watch_over(trainer: L.Trainer, *, grace_s: float = 10.0, poll_s: float = 0.5) -> None:
    """Have a run end when a phase is late, and all its processes when one does or is asked to.

    Call it when a run is set up, on every rank; a second call changes nothing. A process has
    ``grace_s`` to end by itself once another one is gone; ``poll_s`` are between two looks.
    """
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    watches = [callback for callback in callbacks if isinstance(callback, Watch)]
    if not watches:
        watches = [Watch(trainer, grace_s=grace_s, poll_s=poll_s)]
        callbacks += [Termination(trainer), *watches]
    watches[0].begin()


class Watch(L.Callback, RolloutListener):
    """State of this process, and of those that it cannot continue without.

    A phase that takes longer than its deadline ends the run with `DeadlineError`. A collective that
    fails because another process is gone raises `LostProcessError`, which names the phase. Where
    this process launched others, or was launched, a thread looks whether they live: one that is
    stuck is ended with the same message, without waiting for the timeout.
    """

    def __init__(self, trainer: L.Trainer, *, grace_s: float, poll_s: float) -> None:
        self._trainer = trainer
        self._clock, self._deadlines = PhaseClock(), Deadlines()
        self._timeout_s = process_group_timeout(trainer).total_seconds()
        self._family = _Family(trainer)
        self._grace_s, self._poll_s = grace_s, poll_s
        self._ended = threading.Event()
        """The run is torn down."""
        self._ended.set()
        self._leaving = threading.Event()
        """Other processes may end now before this one does."""
        self._stacks = Path()
        self._late = ""
        self._before: Any = None
        # where Lightning has no hook: around the loop, the checkpoints and the end
        if trainer.world_size > 1:
            trainer.fit_loop.run = self.naming_lost_processes()(trainer.fit_loop.run)  # type: ignore[method-assign]
        saved, loaded = trainer.save_checkpoint, trainer.strategy.load_checkpoint
        trainer.save_checkpoint = self._timed("saving", saved)  # type: ignore[method-assign]
        trainer.strategy.load_checkpoint = self._timed("loading", loaded)  # type: ignore[method-assign]
        # after an error too, and after what the callbacks do about it
        at_teardown(trainer, self._finish)

    def begin(self) -> None:
        """Look at the clock, and for the others, until the run is torn down.

        The main thread can be interrupted if it is the one that calls.
        """
        if not self._ended.is_set():
            return
        trainer = self._trainer
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        deadlines = [callback for callback in callbacks if isinstance(callback, Deadlines)]
        self._deadlines = deadlines[0] if deadlines else Deadlines()
        folder = run_folder(trainer)
        if trainer.world_size > 1:
            folder = Path(trainer.strategy.broadcast(str(folder)))
            self._leaving.clear()
        else:
            self._leaving.set()
        self._stacks = folder / f"stacks_rank{trainer.global_rank}.txt"
        self._clock.enter("set-up")
        self._late, self._ended = "", threading.Event()
        main = threading.current_thread() is threading.main_thread()
        if main:
            # None: whoever installed it was not Python
            self._before = signal.signal(_INTERRUPT, self._interrupt) or signal.SIG_DFL
        arguments = (self._ended, main)
        threading.Thread(target=self._look, args=arguments, name="watch", daemon=True).start()

    def _finish(self) -> None:
        if self._before is not None:
            signal.signal(_INTERRUPT, self._before)
            self._before = None
        self._ended.set()
        self._family.end_stopped()
        return_host_memory()

    def _timed(self, phase: str, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._clock.inside(phase):
                return function(*args, **kwargs)

        return timed

    # ---- what runs in a thread beside the training

    def _look(self, ended: threading.Event, main: bool) -> None:
        last = time.monotonic()
        while not ended.wait(self._poll_s):
            now = time.monotonic()
            # while the process was stopped, or the machine slept, the phase used no time
            phase, seconds = self._clock.tick(min(now - last, 2 * self._poll_s))
            last = now
            key, limit = self._deadlines.of(phase)
            if limit is not None and seconds > limit:
                self._expire(key, f"for {seconds:.0f} s, and its deadline is {limit:g} s", main)
                return
            who = "" if self._leaving.is_set() else self._family.find_lost()
            # its own error, if it gets one, says more; else it is stuck where none reaches it
            if who and not self._leaving.wait(self._grace_s):
                end_process(self._sentence("ended", who))

    def _expire(self, key: str, how_long: str, main: bool) -> None:
        """Raise `DeadlineError` in the main thread, and end the process if that is in vain."""
        ended, grace = self._ended, self._deadlines.grace
        rank = self._trainer.global_rank
        reason = f"rank {rank} has been {self.whereabouts} {how_long}"
        late = (
            f"{reason}: {write_stacks(self._stacks, reason)} shows what it was doing; --ckpt_path "
            f"last continues, and the callback Deadlines with another {key} gives it more time"
        )
        if ended.is_set():
            return
        self._late = late
        if main:
            signal.pthread_kill(threading.main_thread().ident or 0, _INTERRUPT)
            if ended.wait(grace):
                # who caught the error may go on; the end of the interpreter waits for threads
                while threading.main_thread().is_alive():
                    time.sleep(self._poll_s)
                time.sleep(grace)
        self._family.end_stopped()
        end_process(late, spare={child.pid for child in self._family.children})

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal, in the main thread."""
        del signum, frame
        late, self._late = self._late, ""
        if late:
            raise DeadlineError(late)

    # ---- what this process is doing

    @property
    def whereabouts(self) -> str:
        """What this process is doing, as part of a sentence."""
        module = self._trainer.lightning_module
        step = "step" if module.automatic_optimization else "iteration"
        phase, _ = self._clock.tick(0)
        return f"in phase '{phase}' of {step} {self._trainer.global_step + 1}"

    def on_phase(self, phase: str) -> None:
        validating = self._trainer.validating or self._trainer.sanity_checking
        between = "validation" if validating else "between phases"
        self._clock.enter(phase or between)

    def on_train_start(self, *_: Any) -> None:
        self._clock.enter("data")

    def on_train_epoch_start(self, *_: Any) -> None:
        self._clock.enter("data")

    def on_train_batch_start(self, *_: Any) -> None:
        self._clock.enter("train")

    def on_train_batch_end(self, *_: Any) -> None:
        # the callbacks of the run come before this one
        self._clock.enter("data")

    def on_train_epoch_end(self, *_: Any) -> None:
        self._clock.enter("end")

    def on_validation_start(self, *_: Any) -> None:
        self._clock.enter("validation")

    def on_validation_batch_start(self, *_: Any) -> None:
        self._clock.enter("validation")

    def on_validation_batch_end(self, *_: Any) -> None:
        self._clock.enter("validation")

    def on_validation_end(self, *_: Any) -> None:
        self._clock.enter("data")

    # ---- who is gone

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._leaving.set()

    @contextlib.contextmanager
    def naming_lost_processes(self) -> Iterator[None]:
        """Raise a collective's error as `LostProcessError` if another process caused it."""
        try:
            yield
        except RuntimeError as error:
            explained = self._explain(error)
            if explained is None:
                self._leave(error)
                raise
            if is_forking(self._trainer.strategy.launcher):
                # the process that forked this one reports the first that ended, and no other
                _logger.error("%s", explained)
            self._family.end(self._grace_s)
            raise LostProcessError(explained) from error
        except BaseException as error:
            self._leave(error)
            raise

    def _leave(self, error: BaseException) -> None:
        """Look no more for processes that may end before this one does."""
        if self._family.children or isinstance(error, SIGTERMException):
            self._leaving.set()

    def _explain(self, error: RuntimeError) -> str | None:
        text = str(error)
        # a reward service may time out too
        if not isinstance(error, torch.distributed.DistError) and not _NETWORK.search(text):
            return None
        if _SILENT.search(text):
            what = f"did not answer within {self._timeout_s:g} s"
        elif _GONE.search(text):
            what = "ended"
        else:
            return None
        time.sleep(self._poll_s)  # its connections are closed before it has quite ended
        return self._sentence(what, self._family.find_lost())

    def _sentence(self, what: str, who: str) -> str:
        return (
            f"another process {what} while rank {self._trainer.global_rank} was {self.whereabouts} "
            f"({who or 'its own last lines say why'}); --ckpt_path last continues"
        )


class _Family:
    """The processes of this machine that this one launched, or that launched this one.

    Every rank builds one at the same time.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.children = launched_processes(trainer)
        self._first_rank = trainer.global_rank + 1
        self._parent = self._find_parent(trainer)
        if self.children:
            retire_observer()

    def find_lost(self) -> str:
        """Say who is gone and how; empty: nobody."""
        for rank, child in enumerate(self.children, start=self._first_rank):
            status = child.poll()
            if status not in {None, 0, STATUS}:
                return f"rank {rank} {_how(status)}"
        if self._parent is not None and os.getppid() != self._parent:
            return "the process that launched this one is gone"
        return ""

    def end(self, grace_s: float) -> None:
        """Wait for what this process launched to end, and kill what does not."""
        deadline = time.monotonic() + grace_s
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(deadline - time.monotonic(), 0))
            child.kill()

    def end_stopped(self) -> None:
        """Kill ranks of this machine that were stopped: they hear of no end, and of no signal."""
        with contextlib.suppress(psutil.Error):
            others = [psutil.Process(child.pid) for child in self.children if child.poll() is None]
            if self._parent is not None:
                others += psutil.Process(self._parent).children()
            for process in others:
                if process.status() == psutil.STATUS_STOPPED:
                    process.kill()

    def _find_parent(self, trainer: L.Trainer) -> int | None:
        """Process id of who launched this one, if that is part of the run.

        The parent of a process that torchrun, SLURM or a shell started is none of our business:
        they have their own ways, and a shell may end long before the run.
        """
        if is_forking(trainer.strategy.launcher):
            return os.getppid()
        if trainer.world_size == 1:
            return None
        launched = (socket.gethostname(), [child.pid for child in self.children])
        known: list[tuple[str, list[int]]] = [launched] * trainer.world_size
        torch.distributed.all_gather_object(known, launched)
        is_local = any(host == launched[0] and os.getpid() in pids for host, pids in known)
        return os.getppid() if is_local else None


def _how(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
