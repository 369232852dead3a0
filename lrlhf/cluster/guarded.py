"""Programs that run beside a Ray worker and end with it, with everything that they have started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

import lrlhf

_GUARD = Path(lrlhf.__file__).parent / "rollout" / "vllm" / "process_guard.py"
"""By its path: to import it would import torch and transformers into each of Ray's workers."""
_BETWEEN = Path(__file__).with_name("between.py")
_GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL."""


class GuardedProgram:
    """A program under a guard, see `lrlhf.rollout.vllm.process_guard`.

    Ray kills the direct children of a worker with it, which would be the guard, who could end
    nothing then. So a process stands between the two (`lrlhf.cluster.between`), which goes with the
    worker, whoever ends that; and the guard sees it go.

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
        between = [sys.executable, "-P", str(_BETWEEN), str(os.getpid())]
        log = None if log_file is None else log_file.open("ab")
        self._between = subprocess.Popen(
            [*between, str(_GUARD), str(_GRACE), *command],
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
            return self._between.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def ask_to_end(self) -> None:
        """Send SIGTERM to the program alone, which ends when it is through."""
        for program in self._below(2):
            program.terminate()

    def stop(self) -> None:
        """End it with all that it has started, and wait for that."""
        for guard in self._below(1):
            guard.terminate()
        self._between.wait(_GRACE + 10)

    def _below(self, levels: int) -> list[psutil.Process]:
        """Return the guard (1 level below that) or the program (2); nothing: it has ended."""
        try:
            found = [psutil.Process(self._between.pid)]
            for _ in range(levels):
                found = [child for process in found for child in process.children()]
        except psutil.NoSuchProcess:
            return []
        return found
