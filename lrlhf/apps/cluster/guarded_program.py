"""Programs that run beside a Ray worker and end with it, with everything that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

import lrlhf

_GUARD = Path(lrlhf.__file__).with_name("process_guard.py")
"""By its path: to import it would import torch and transformers into each of Ray's workers."""
_GUARD_PARENT = Path(__file__).with_name("guard_parent.py")
_GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL."""
_LOOK_SECONDS = 0.2


class GuardedProgram:
    """A program under a guard, see `lrlhf.process_guard`.

    Ray kills the direct children of a worker with it, which would be the guard, who could end
    nothing then. So a process stands between the two (`lrlhf.apps.cluster.guard_parent`). It goes
    with the worker, whoever ends that, and the guard sees it go. Either of them ends everything if
    the other is killed.

    Args:
        command: Program and arguments.
        env: Its whole environment.
        folder: Its working folder.
        log_file: Gets its output; None: that goes where the worker's goes.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        folder: Path,
        log_file: Path | None = None,
    ) -> None:
        guard_parent = [sys.executable, "-P", str(_GUARD_PARENT), str(os.getpid())]
        log = None if log_file is None else log_file.open("ab")
        self._guard_parent = subprocess.Popen(
            [*guard_parent, str(_GUARD), str(_GRACE), *command],
            env=dict(env),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        if log is not None:
            log.close()

    def wait(self, seconds: float) -> int | None:
        """Return the exit status, 128 + n after signal n; None: it still runs after so long."""
        try:
            return self._guard_parent.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def ask_to_end(self) -> bool:
        """Send SIGTERM to the program alone, which ends when it is through.

        Returns:
            Whether there was a program: the guard may not have started it yet.
        """
        programs = self._below(2)
        _send(programs, signal.SIGTERM)
        return bool(programs)

    def stop(self) -> None:
        """End it with all that it has started, and wait for that.

        Raises:
            subprocess.TimeoutExpired: Something is left that not even SIGKILL ends.
        """
        deadline = time.monotonic() + _GRACE + 10
        # again and again, as the guard may not have been started yet
        while self.wait(_LOOK_SECONDS) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self._guard_parent.args, _GRACE + 10)
            _send(self._below(1), signal.SIGTERM)

    def _below(self, levels: int) -> list[psutil.Process]:
        """Return the guard (1 level below that) or the program (2); nothing: it has ended."""
        try:
            processes = [psutil.Process(self._guard_parent.pid)]
            for _ in range(levels):
                processes = [child for process in processes for child in process.children()]
        except psutil.NoSuchProcess:
            return []
        return processes


def _send(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended in this moment
            process.send_signal(number)
