"""Every phase of a run has an end: one that takes too long is named, and ends the run.

A hang costs as much as training does, and says nothing. A thread looks at a monotonic clock; when
a phase is late it writes down where every thread of the process is, raises `DeadlineError` in the
main thread, so that engines, servers and loaders close, and ends the process where that is in
vain because the main thread waits in C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import math
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Final

from lrlhf.rollout.vllm.process_guard import members, process_table, send_signal

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


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds that each phase may take at a stretch; None: as long as it likes.

    The defaults are for hangs, not for slowness: several times what the phase takes in the largest
    runs that we know of. Time in which another phase runs inside a phase is not counted twice.

    Args:
        setup: From the start of fit to the first batch; models of the module load in it.
        load: Reading a checkpoint.
        data: Waiting for one batch.
        sync: Bringing an engine its weights.
        generate: Drawing the responses of an iteration, or of a batch of a validation.
        reward: Scoring them.
        logprob: Log-probabilities and values of an iteration.
        update: The optimizer steps of an iteration.
        train: The rest of a training step; all of it where a module tells no phases.
        validation: A batch of a validation, without its responses and rewards.
        save: Writing a checkpoint.
        end: After the last batch: exports, reports.
        grace: Between the error in the main thread and the end of the process by force.
    """

    setup: float | None = 4 * _HOUR
    load: float | None = 2 * _HOUR
    data: float | None = 1 * _HOUR
    sync: float | None = 1 * _HOUR
    generate: float | None = 4 * _HOUR
    reward: float | None = 2 * _HOUR
    logprob: float | None = 2 * _HOUR
    update: float | None = 4 * _HOUR
    train: float | None = 2 * _HOUR
    validation: float | None = 2 * _HOUR
    save: float | None = 2 * _HOUR
    end: float | None = 4 * _HOUR
    grace: float = 60.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.name != "grace":
                continue
            if value is None or not 0 < value < math.inf:
                raise ValueError(
                    f"deadline {field.name} is {value}; give seconds above 0"
                    + ("" if field.name == "grace" else ", or null for none")
                )

    def of(self, phase: str) -> tuple[str, float | None]:
        """Return the option that holds the deadline of a phase, and its seconds."""
        known = {field.name for field in dataclasses.fields(self)} - {"grace"}
        key = _KEYS.get(phase, phase)
        key = key if key in known else "train"
        seconds: float | None = getattr(self, key)
        return key, seconds


class SetsDeadlines(ABC):
    """What a callback derives from that gives a run other deadlines than the defaults."""

    @property
    @abstractmethod
    def limits(self) -> Limits:
        """Of every phase."""

    @property
    @abstractmethod
    def stacks_folder(self) -> Path | None:
        """Where the stacks are written; None: in the folder of the run."""


class PhaseClock:
    """Which phase this is, and how many seconds it has used.

    Phases nest: while an inner one runs, the outer one stands still.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phase, self._since = "set-up", time.monotonic()
        self._outer: list[tuple[str, float]] = []

    def enter(self, phase: str) -> None:
        """Begin a phase, which ends the one before."""
        with self._lock:
            self._phase, self._since = phase, time.monotonic()

    @contextlib.contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Be in another phase for a while."""
        with self._lock:
            now = time.monotonic()
            self._outer.append((self._phase, now - self._since))
            self._phase, self._since = phase, now
        try:
            yield
        finally:
            with self._lock:
                self._phase, used = self._outer.pop()
                self._since = time.monotonic() - used

    def read(self) -> tuple[str, float]:
        """Return the phase, and the seconds that it has used."""
        with self._lock:
            return self._phase, time.monotonic() - self._since

    def forgive(self, seconds: float) -> None:
        """Leave out seconds in which the process did not run."""
        with self._lock:
            self._since = min(self._since + seconds, time.monotonic())


class DeadlineWatch:
    """Ends a run when a phase is late.

    Args:
        clock: Of the run.
        limits: Of the phases.
        rank: Of this process.
        folder: Where the stacks are written, to ``stacks_rank<rank>.txt``.
        whereabouts: Says where the run is, as part of a sentence.
        ranks: Processes that end by themselves once this one is gone.
        poll_s: Seconds between two looks.
    """

    def __init__(
        self,
        clock: PhaseClock,
        limits: Limits,
        *,
        rank: int,
        folder: Path,
        whereabouts: Callable[[], str],
        ranks: set[int],
        poll_s: float,
    ) -> None:
        self._clock, self._limits = clock, limits
        self._rank, self._folder = rank, folder
        self._whereabouts, self._ranks = whereabouts, ranks
        self._poll_s = poll_s
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._said = ""
        self._told = False
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
        last, worked = time.monotonic(), time.process_time()
        while not self._done.wait(self._poll_s):
            now, work = time.monotonic(), time.process_time()
            gap = now - last - self._poll_s
            # stopped, or suspended: a process that computes in C without a pause works meanwhile
            if gap > max(1.0, self._poll_s):
                self._clock.forgive(max(gap - (work - worked), 0.0))
            last, worked = now, work
            phase, seconds = self._clock.read()
            key, limit = self._limits.of(phase)
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
        self._end()

    def _raise(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal, in the main thread."""
        del signum, frame
        if self._said and not self._told:
            self._told = True
            raise DeadlineError(self._said)

    def _wait_for_the_end(self) -> None:
        """Return when the process should have ended by itself, and has not."""
        if self._done.wait(self._limits.grace):
            # who caught the error may go on; the end of the interpreter waits for threads
            while threading.main_thread().is_alive():
                time.sleep(self._poll_s)
            time.sleep(self._limits.grace)

    def _end(self) -> None:
        """End this process from the thread: the main one is stuck where nothing reaches it."""
        _write(f"error: {self._said}\n")
        end_descendants(_CHILDREN_S, spare=self._ranks)
        os._exit(1)


def end_descendants(grace_s: float, *, spare: set[int]) -> None:
    """End what this process started, and what that has started.

    Args:
        grace_s: Seconds between SIGTERM and SIGKILL.
        spare: Processes that are left alone, such as ranks that end by themselves.
    """
    deadline = time.monotonic() + grace_s
    send_signal(_descendants(spare), signal.SIGTERM)
    while (left := _descendants(spare)) and time.monotonic() < deadline:
        time.sleep(0.05)
    send_signal(left, signal.SIGKILL)


def _descendants(spare: set[int]) -> set[int]:
    table = process_table()
    kept = set(spare).union(*(members(pid, table) for pid in spare))
    return {pid for pid in members(os.getpid(), table) - kept if not table[pid].zombie}


def _write(text: str) -> None:
    # not through sys.stderr: a thread that is stuck may hold its lock
    with contextlib.suppress(OSError):
        os.write(_STDERR, text.encode(errors="replace"))
