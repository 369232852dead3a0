"""A server as a child process that ends with its parent."""

from __future__ import annotations

import atexit
import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from lrlhf.process_guard import end_guarded, guarded

GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL.

``_CHILDREN_S`` of `lrlhf.run.supervision.watch` must be at least a second longer: a run that
ends at its deadline would else kill the guard before this has ended its children.
"""
_TAIL_LINES = 30
_TAIL_BYTES = 256 * 1024
_SECRET_NAME = re.compile(r"(key|token|secret|password)$", re.IGNORECASE)


class ServerStartError(RuntimeError):
    """A server exited or timed out before it was ready."""


class ServerProcess:
    """A server as a child process, which ends with this process, killed or not.

    The guard process (`lrlhf.process_guard`) ends the server and all its children.

    Args:
        command: Program and arguments of the server.
        env: The complete environment of the server. Values of variables and options whose names
            end in key, token, secret or password are hidden in `log_tail` and errors.
        log_file: File that the server's output is appended to.
    """

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], log_file: Path) -> None:
        self._command = list(command)
        self._env = dict(env)
        self._log_file = log_file
        self._log_start = 0
        self._guard: subprocess.Popen[bytes] | None = None
        self._trainer = 0

    def start(self) -> None:
        """Start the server and return at once."""
        self._trainer = os.getpid()
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("ab") as log:
            self._log_start = log.tell()
            self._guard = subprocess.Popen(
                guarded(self._command, grace=GRACE),
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        atexit.register(self.stop)

    @property
    def is_running(self) -> bool:
        """Whether the server was started and has not exited."""
        return self._guard is not None and self._guard.poll() is None

    def wait_until(self, ready: Callable[[], bool], *, timeout: float, poll: float = 0.2) -> None:
        """Poll until the server is ready; stop it if it is not in time. Times are in seconds.

        Raises:
            ServerStartError: The server exited or timed out; with the end of the log.
        """
        guard = self._guard  # another thread may stop the server meanwhile
        assert guard is not None
        deadline = time.monotonic() + timeout
        what = f"was not ready after {timeout:g} s"
        while time.monotonic() < deadline:
            if (code := guard.poll()) is not None:
                what = f"ended with code {code} before it was ready"
                break
            if ready():
                return
            time.sleep(poll)
        self.stop()
        tail = self.log_tail(_TAIL_LINES) or "(nothing)"
        raise ServerStartError(f"the server {what}. The end of {self._log_file}:\n{tail}")

    def log_tail(self, lines: int) -> str:
        """Return the last lines of the log since the last start."""
        with self._log_file.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(min(self._log_start, size), size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
        words = [word for argument in self._command for word in argument.split("=", 1)]
        named = [*self._env.items(), *pairwise(words)]
        # shorter values are words such as "false", not secrets
        secrets = {value for name, value in named if _SECRET_NAME.search(name) and len(value) >= 8}
        for secret in sorted(secrets, key=len, reverse=True):  # one may contain another
            text = text.replace(secret, "***")
        return "\n".join(deque(text.splitlines(), maxlen=lines))

    def stop(self) -> bool:
        """End the server and all its processes, and wait for them.

        Returns:
            Whether it was running.

        Raises:
            RuntimeError: The guard was killed, and its children do not end on SIGKILL.
        """
        # not in a forked child, such as a worker of a data loader
        if self._guard is None or os.getpid() != self._trainer:
            return False
        ran = self.is_running
        code = end_guarded(self._guard, grace=GRACE)
        self._guard = None
        atexit.unregister(self.stop)
        return ran and code == 128 + signal.SIGTERM


def root_cause(log: str) -> str | None:
    """Return the error in a server's log that caused the others, if any."""
    raised = re.findall(r"\b([A-Z]\w*(?:Error|Exception): .+)$", log, re.MULTILINE)
    # other processes refer to the one that failed
    causes = [line for line in raised if "root cause" not in line]
    return causes[-1] if causes else None
