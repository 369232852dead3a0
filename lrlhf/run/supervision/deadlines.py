"""How long the phases of a run may take, and the end of a process that has taken too long."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import lightning as L
import psutil

from lrlhf.arguments import KeepsArguments
from lrlhf.process_guard import descendants, send_signal

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


def end_process(said: str, *, spare: Collection[int] = ()) -> None:
    """End this process from a thread, with the status and the line of an error.

    What it started, and what that has started, goes first: it would keep pipes open. Those to
    ``spare``, such as other ranks, end by themselves.
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
