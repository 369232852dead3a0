"""A server as a child process that never outlives the process that started it."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from lrlhf.rollout.vllm import process_guard as guard

ABORT_GRACE = 1.5
"""Seconds between SIGTERM and SIGKILL when nobody is there to wait for longer."""
TAIL_LINES = 30
TAIL_BYTES = 256 * 1024
_SECRET_NAME = re.compile(r"(key|token|secret|password)$", re.IGNORECASE)


class ServerStartError(RuntimeError):
    """A server ended, or its time ran out, before it was ready."""


class ServerProcess:
    """Runs a server under a guard that ends all its processes with this one.

    When this process ends, killed or not, the guard (see
    `lrlhf.rollout.vllm.process_guard`) notices and
    ends the server with everything that it started. ``start`` and ``stop`` may alternate.

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
        self._ended = True
        self._exit_code: int | None = None

    def start(self) -> None:
        """Start the server and return at once.

        Raises:
            RuntimeError: It is running already.
        """
        if self.running:
            raise RuntimeError("the server is running already: stop it first")
        self.stop(ABORT_GRACE)  # what an earlier server that crashed may have left
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        # isolated and without site-packages: nothing in the environment can break the guard
        script = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(ABORT_GRACE)]
        with self._log_file.open("ab") as log:
            self._log_start = log.tell()
            self._guard = subprocess.Popen(
                [*script, "--", *self._command],
                env=self._env,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        atexit.register(self.stop, ABORT_GRACE)
        assert self._guard.stdout is not None
        os.set_blocking(self._guard.stdout.fileno(), False)
        self._ended, self._exit_code = False, None
        _STARTED.add(self)

    @property
    def running(self) -> bool:
        """Whether the command itself has not ended; processes that it leaves do not count."""
        if not self._ended:
            assert self._guard is not None
            assert self._guard.stdout is not None
            # None: nothing to read as yet
            status = self._guard.stdout.read(64)
            self._ended = status is not None
            self._exit_code = int(status) if status else None
        return not self._ended

    @property
    def exit_code(self) -> int | None:
        """The command's code, 128 + n after signal n; None if it runs, or was made to end."""
        return None if self.running else self._exit_code

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
        deadline = time.monotonic() + timeout
        while self.running:
            if ready():
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._start_error(f"was not ready after {timeout:g} s")
            time.sleep(min(poll, left))
        code = "" if self._exit_code is None else f" with code {self._exit_code}"
        raise self._start_error(f"ended{code} before it was ready")

    def _start_error(self, what: str) -> ServerStartError:
        self.stop(ABORT_GRACE)
        tail = self.log_tail(TAIL_LINES) or "(nothing)"
        return ServerStartError(f"the server {what}. The end of {self._log_file}:\n{tail}")

    def log_tail(self, lines: int) -> str:
        """Read the last lines that the server wrote since it was started last."""
        if not self._log_file.exists():
            return ""
        with self._log_file.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(min(self._log_start, size), size - TAIL_BYTES))
            text = log.read().decode(errors="replace")
        for secret in self._secrets():
            text = text.replace(secret, "***")
        return "\n".join(deque(text.splitlines(), maxlen=lines))

    def _secrets(self) -> list[str]:
        """List what must not be shown, the longest first as one may contain another."""
        named = list(self._env.items())
        option = ""
        for argument in self._command:
            if argument.startswith("-"):
                option, _, argument = argument.partition("=")
            named.append((option, argument))
        # shorter values are words such as "false", not secrets
        found = {value for name, value in named if _SECRET_NAME.search(name) and len(value) >= 8}
        return sorted(found, key=len, reverse=True)

    def pids(self) -> list[int]:
        """List the processes that live: the guard, the server and all that it started."""
        if self._guard is None:
            return []
        table = guard.process_table()
        candidates = {self._guard.pid} | guard.members(self._guard.pid, table)
        return sorted(pid for pid in candidates if pid in table and not table[pid].zombie)

    def stop(self, grace: float = 10.0) -> None:
        """End the server; return when none of its processes is left. Does nothing the second time.

        Args:
            grace: Seconds between SIGTERM and SIGKILL.

        Raises:
            RuntimeError: A process did not even end on SIGKILL.
        """
        if self._guard is None:
            return
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the guard ended already
            self._guard.stdin.write(f"{grace}\n".encode())
        try:
            self._guard.wait(grace + 10)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        if self._guard.returncode < 0:
            _kill_members(self._guard.pid)
        _ = self.running  # reads the exit code before the pipe closes
        self._ended = True
        self._forget()
        atexit.unregister(self.stop)

    def _forget(self) -> None:
        """Close this process's ends of the pipes."""
        if self._guard is not None:
            for pipe in (self._guard.stdin, self._guard.stdout):
                assert pipe is not None
                pipe.close()
            if self._guard.returncode is None:
                self._guard.returncode = 0  # in a forked child, who cannot wait for it
        self._guard, self._ended = None, True
        _STARTED.discard(self)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.stop(ABORT_GRACE)


def _kill_members(pid: int) -> None:
    """End what a guard left that was killed itself; no orphan adopted it, but the session holds."""
    deadline = time.monotonic() + 10
    while True:
        table = guard.process_table()
        left = {member for member in guard.members(pid, table) if not table[member].zombie}
        if not left:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {sorted(left)} of the server do not end on SIGKILL")
        guard.send_signal(left, signal.SIGKILL)
        time.sleep(0.02)


_STARTED: weakref.WeakSet[ServerProcess] = weakref.WeakSet()


def _forget_in_child() -> None:
    # a forked child, such as a worker of a data loader, holds a copy of the pipe: the end of file
    # would come with its end, and its own exit would end the server
    for server in list(_STARTED):
        server._forget()


os.register_at_fork(after_in_child=_forget_in_child)
