"""Every phase of a run has an end: one that takes too long is named, and ends the run.

A hang costs as much as training does, and says nothing. A thread counts the seconds of the phase;
when it is late, `faulthandler` writes down where every thread of the process is, `DeadlineError` is
raised in the main thread, so that engines, servers and loaders close, and the process is ended
where that is in vain because the main thread waits in C.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Final

import lightning as L
import psutil

from lrlhf.rollout.vllm.process_guard import descendants, send_signal

_HOUR = 3600.0
_INTERRUPT: Final = signal.SIGURG
"""Ignored by every process that does not ask for it, and used by no library of ours."""
_STDERR = 2
_CHILDREN_S = 5.0
_KEYS = {"set-up": "setup", "saving": "save", "loading": "load", "between phases": "train"}


class DeadlineError(Exception):
    """A phase took longer than its deadline.

    No `RuntimeError`, because readers of images and clients of engines take those for their own.
    """


class Deadlines(L.Callback):
    """Gives the phases of a run other deadlines than they have without it.

    Every run has deadlines; this callback changes them. The defaults are for hangs, not for
    slowness: several times what the phase takes in the largest runs that we know of. A phase that
    takes longer at a stretch ends the run with exit status 1: the message names phase, iteration
    and rank, and where every thread of the process was stands in ``stacks_rank<rank>.txt``. Time in
    which another phase runs inside a phase, the process is stopped or the machine sleeps does not
    count. All values are seconds; null means none.

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
        dirpath: Folder of the stacks; None: the logger's, else the trainer's root.

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
        dirpath: str | Path | None = None,
    ) -> None:
        self.grace = grace
        self.dirpath = None if dirpath is None else Path(dirpath)
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


class DeadlineWatch:
    """Ends a run when a phase is late.

    Args:
        clock: Of the run.
        deadlines: Of the phases.
        rank: Of this process.
        folder: Where the stacks are written, to ``stacks_rank<rank>.txt``.
        whereabouts: Says where the run is, as part of a sentence.
        ranks: Processes that end by themselves once this one is gone.
        poll_s: Seconds between two looks.
    """

    def __init__(
        self,
        clock: PhaseClock,
        deadlines: Deadlines,
        *,
        rank: int,
        folder: Path,
        whereabouts: Callable[[], str],
        ranks: Collection[int],
        poll_s: float,
    ) -> None:
        self._clock, self._deadlines = clock, deadlines
        self._rank, self._folder = rank, folder
        self._whereabouts, self._ranks = whereabouts, ranks
        self._poll_s = poll_s
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._said = ""
        self._raised = False
        self._reaches_main = threading.current_thread() is threading.main_thread()
        self._before: object = None

    def begin(self) -> None:
        """Look until `finish`; the main thread can be interrupted if it is the one that calls."""
        if self._reaches_main:
            self._before = signal.signal(_INTERRUPT, self._raise)
        threading.Thread(target=self._look, name="deadlines", daemon=True).start()

    def finish(self) -> None:
        """Look no more: the run has ended, in whatever way."""
        if self._reaches_main and not self._done.is_set():
            # None: whoever installed it was not Python
            before = signal.SIG_DFL if self._before is None else self._before
            signal.signal(_INTERRUPT, before)  # type: ignore[arg-type]
        with self._lock:
            self._done.set()

    def write_stacks(self, reason: str) -> str:
        """Write where every thread is to stderr and to the run's folder.

        Returns:
            Where that can be read, as part of a sentence.
        """
        _write(f"{reason}; the threads of this process are at\n")
        faulthandler.dump_traceback(_STDERR)
        path = self._folder / f"stacks_rank{self._rank}.txt"
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

    def _look(self) -> None:
        """Run in a thread beside the training."""
        last = time.monotonic()
        while not self._done.wait(self._poll_s):
            now = time.monotonic()
            # while the process was stopped, or the machine slept, the phase used no time
            phase, seconds = self._clock.tick(min(now - last, 2 * self._poll_s))
            last = now
            key, limit = self._deadlines.of(phase)
            if limit is not None and seconds > limit:
                self._expire(key, seconds, limit)
                return

    def _expire(self, key: str, seconds: float, limit: float) -> None:
        reason = (
            f"rank {self._rank} has been {self._whereabouts()} for {seconds:.0f} s, and its "
            f"deadline is {limit:g} s"
        )
        where = self.write_stacks(reason)
        with self._lock:
            if self._done.is_set():
                return
            self._said = (
                f"{reason}: {where} shows what it was doing; --ckpt_path last continues, and the "
                f"callback Deadlines with another {key} gives it more time"
            )
        if self._reaches_main:
            signal.pthread_kill(threading.main_thread().ident or 0, _INTERRUPT)
            self._wait_for_the_end()
        # the main thread is stuck where nothing reaches it
        end_process(self._said, spare=self._ranks)

    def _raise(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal, in the main thread."""
        del signum, frame
        if self._said and not self._raised:
            self._raised = True
            raise DeadlineError(self._said)

    def _wait_for_the_end(self) -> None:
        """Return when the process should have ended by itself, and has not."""
        if self._done.wait(self._deadlines.grace):
            # who caught the error may go on; the end of the interpreter waits for threads
            while threading.main_thread().is_alive():
                time.sleep(self._poll_s)
            time.sleep(self._deadlines.grace)


def end_process(said: str, *, spare: Collection[int] = ()) -> None:
    """End this process from a thread, with the status and the line of an error.

    What it started, and what that has started, goes first: it would keep pipes open.

    Args:
        said: The error.
        spare: Processes that end by themselves, such as other ranks.
    """
    deadline = time.monotonic() + _CHILDREN_S
    send_signal(_descendants(spare), signal.SIGTERM)
    while (left := _descendants(spare)) and time.monotonic() < deadline:
        time.sleep(0.05)
    send_signal(left, signal.SIGKILL)
    _write(f"error: {said}\n")
    os._exit(1)


def _descendants(spare: Collection[int]) -> list[psutil.Process]:
    kept = {*spare, *(process.pid for pid in spare for process in descendants(pid))}
    return [process for process in descendants(os.getpid()) if process.pid not in kept]


def _write(text: str) -> None:
    # not through sys.stderr: a thread that is stuck may hold its lock
    with contextlib.suppress(OSError):
        os.write(_STDERR, text.encode(errors="replace"))
