"""One ``lrlhf fit`` in a process group of its own, from its start to its end or its kill."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import psutil

from tests.faults.cases import ROOT

_START_LIMIT = 600.0
"""Seconds until a process trains: a vLLM server takes minutes on a busy machine."""
_RUN_LIMIT = 1800.0
"""Seconds of a whole process, after which something hangs."""
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "LRLHF_DEBUG": "1",
}


class BrokenRunError(RuntimeError):
    """A run did not end as it should, apart from the kills."""


class Course(NamedTuple):
    """The way of a run that nothing disturbs."""

    marks: list[str]
    """Where it comes by, in order."""
    seconds: float
    """From the first mark to the end."""

    def place_of(self, marks: Sequence[str]) -> int:
        """Tell where on this way a run begins; ``marks`` are its first ones."""
        step = marks[0].rpartition("@")[2] if marks else "0"
        return self.marks.index(f"trained@{step}") if step != "0" else 0


class Child(Protocol):
    """A running process."""

    pid: int

    def wait(self, timeout: float) -> int | None:
        """Wait for its status, negative for a signal; None: it runs on."""
        ...


class Starter(Protocol):
    """Starts processes."""

    def start(
        self, folder: Path, arguments: list[str], environment: dict[str, str], log: Path
    ) -> Child:
        """Start ``lrlhf`` in a folder."""
        ...


class FreshChild:
    """A process that the harness itself has started."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.pid = process.pid

    def wait(self, timeout: float) -> int | None:
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None


class Fresh:
    """Starts a new interpreter each time, as a user does."""

    def start(
        self, folder: Path, arguments: list[str], environment: dict[str, str], log: Path
    ) -> FreshChild:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "lrlhf", *arguments],
                cwd=folder,
                env=os.environ | ENVIRONMENT | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return FreshChild(process)


class Nursery:
    """Forks runs from one process that has imported everything, see `tests.faults.nursery`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.nursery"],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._read(_START_LIMIT)

    def start(
        self, folder: Path, arguments: list[str], environment: dict[str, str], log: Path
    ) -> "ForkedChild":
        request = {
            "folder": str(folder),
            "arguments": arguments,
            "environment": environment,
            "log": str(log),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        pid = self._read(_START_LIMIT)
        assert pid is not None
        return ForkedChild(self, int(pid))

    def close(self) -> None:
        """End it; a run that it has forked goes on."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _read(self, timeout: float) -> str | None:
        """Read one line of its answers; None: there is none in that time."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            return None
        # lines of a few bytes, one per event: unbuffered, so that select sees all that is left
        line = self._process.stdout.readline()
        if not line:
            raise BrokenRunError("the process that forks the runs has ended")
        return line.decode().strip()


class ForkedChild:
    """A process that a `Nursery` has forked."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid
        self._status: int | None = None

    def wait(self, timeout: float) -> int | None:
        if self._status is None:
            line = self._nursery._read(timeout)
            self._status = None if line is None else int(line)
        return self._status


class Process:
    """A run, its marks and its log.

    Args:
        folder: Has ``config.yaml``; the run is written below it.
        starter: Starts the process.
        resumes: Continue from the last checkpoint.
        kill: See `tests.faults.kill_points`.
    """

    def __init__(self, folder: Path, starter: Starter, *, resumes: bool, kill: str = "") -> None:
        number = len(list(folder.glob("*.log")))
        self.log = folder / f"{number}.log"
        self._marks = folder / f"{number}.marks"
        arguments = ["fit", "--config", "config.yaml"]
        arguments += ["--ckpt_path", "last"] if resumes else []
        environment = {"LRLHF_MARKS": str(self._marks), "LRLHF_KILL": kill}
        self._child = starter.start(folder, arguments, environment, self.log)

    @property
    def marks(self) -> list[str]:
        """What the run has come by, in order."""
        return self._marks.read_text().split() if self._marks.exists() else []

    @property
    def last_mark(self) -> str:
        """How far the run has come."""
        return self.marks[-1] if self.marks else "start-up"

    def wait_for_marks(self) -> None:
        """Wait until the run has begun with its first validation, or its training."""
        limit = time.monotonic() + _START_LIMIT
        while not self.marks:
            if self._child.wait(0.02) is not None:
                # whoever waits for its end finds it
                return
            if time.monotonic() > limit:
                self._end()
                raise BrokenRunError(f"no training after {_START_LIMIT:.0f} s; see {self.log}")

    def kill_within(self, share: float, whole: "Course") -> None:
        """Kill the run, its workers and its engine, unless it ends before.

        Args:
            share: Of the way that it has before it when it begins, from 0 to 1.
            whole: Of the run that nothing disturbs.
        """
        ahead = whole.marks[whole.place_of(self.marks) :]
        marks, rest = divmod(share * len(ahead), 1.0)
        limit = time.monotonic() + _RUN_LIMIT
        while len(self.marks) < int(marks) + 1:
            if self._child.wait(0.005) is not None:
                return
            if time.monotonic() > limit:
                self._end()
                raise BrokenRunError(f"not killed after {_RUN_LIMIT:.0f} s; see {self.log}")
        # not at the mark, but anywhere between it and the next one
        if self._child.wait(rest * whole.seconds / len(whole.marks)) is None:
            self._end()

    def _end(self) -> None:
        others = psutil.Process(self._child.pid).children(recursive=True)
        os.killpg(self._child.pid, signal.SIGKILL)
        for other in others:
            # an engine has a group of its own
            with contextlib.suppress(psutil.NoSuchProcess):
                other.kill()

    def wait(self) -> int:
        """Wait for the end, and return the status."""
        status = self._child.wait(_RUN_LIMIT)
        if status is None:
            self._end()
            self._child.wait(60)
            raise BrokenRunError(f"not ended after {_RUN_LIMIT:.0f} s; see {self.log}")
        return status

    def wait_for_end(self) -> None:
        """Wait for an end without errors, of which nothing is left."""
        status = self.wait()
        if status != 0:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise BrokenRunError(f"status {status}; the end of {self.log}:\n{tail}")
        self.wait_for_others()

    def wait_for_others(self) -> None:
        """Wait until nothing of the run is left: workers and engines end by themselves."""
        limit = time.monotonic() + 60
        while left := list(self._left()):
            if time.monotonic() > limit:
                raise BrokenRunError(f"processes {left} outlive the run in {self.log.parent}")
            time.sleep(0.1)

    def _left(self) -> Iterator[int]:
        # children that are forked show the environment of the process that forked them, but the
        # group that they were put in is the run's
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.AccessDenied, psutil.NoSuchProcess, ProcessLookupError):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                in_group = os.getsid(process.pid) == self._child.pid
                if in_group or process.environ().get("LRLHF_MARKS") == str(self._marks):
                    yield process.pid
