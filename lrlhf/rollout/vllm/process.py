"""A server as a child process that never outlives the process that started it."""

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
ends at its deadline would else kill the guard before that has ended all others.
"""
_TAIL_LINES = 30
_TAIL_BYTES = 256 * 1024
_SECRET_NAME = re.compile(r"(key|token|secret|password)$", re.IGNORECASE)


class ServerStartError(RuntimeError):
    """A server ended, or its time ran out, before it was ready."""


class ServerProcess:
    """Runs a server under a guard that ends all its processes with this one.

    When this process ends, killed or not, the guard (see `lrlhf.process_guard`)
    notices and ends the server with everything that it started.

    Args:
        command: Program and arguments of the server.
        env: The whole environment of the server. Values of variables and options whose names end
            in key, token, secret or password are blanked in what `log_tail` and errors show.
        log_file: Gets the server's output, after what it holds already.
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
        """Whether the server has been started and has not ended."""
        return self._guard is not None and self._guard.poll() is None

    def wait_until(self, ready: Callable[[], bool], *, timeout: float, poll: float = 0.2) -> None:
        """Wait for the server; stop it if it does not become ready.

        Args:
            ready: Asked again and again; says no, rather than raise, while nothing answers. What
                it raises passes through.
            timeout: Seconds from now.
            poll: Seconds between two questions.

        Raises:
            ServerStartError: The server ended or the time ran out; with the end of the log.
        """
        guard = self._guard  # which is gone if another thread stops the server meanwhile
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
        """Read the last lines that the server wrote since it was started last."""
        with self._log_file.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(min(self._log_start, size), size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
        for secret in self._secrets():
            text = text.replace(secret, "***")
        return "\n".join(deque(text.splitlines(), maxlen=lines))

    def _secrets(self) -> list[str]:
        """List what must not be shown, the longest first as one may contain another."""
        words = [word for argument in self._command for word in argument.split("=", 1)]
        named = [*self._env.items(), *pairwise(words)]
        # shorter values are words such as "false", not secrets
        found = {value for name, value in named if _SECRET_NAME.search(name) and len(value) >= 8}
        return sorted(found, key=len, reverse=True)

    def stop(self) -> bool:
        """End the server; returns when none of its processes is left.

        Returns:
            Whether it ran until then; False also where there was nothing to end.

        Raises:
            RuntimeError: The guard was killed, and what it left does not even end on SIGKILL.
        """
        # a forked child that exits, such as a worker of a data loader, ends nothing
        if self._guard is None or os.getpid() != self._trainer:
            return False
        ran = self.is_running
        code = end_guarded(self._guard, grace=GRACE)
        self._guard = None
        atexit.unregister(self.stop)
        return ran and code == 128 + signal.SIGTERM


def root_cause(log: str) -> str | None:
    """Find the error in a server's log that the others follow from."""
    raised = re.findall(r"\b([A-Z]\w*(?:Error|Exception): .+)$", log, re.MULTILINE)
    # processes that wait for the one that failed only say that it did
    causes = [line for line in raised if "root cause" not in line]
    return causes[-1] if causes else None
