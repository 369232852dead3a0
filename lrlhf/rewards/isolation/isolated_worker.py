"""A process that runs a reward function, from the side of the parent; see `isolated_child`."""

from __future__ import annotations

import json
import math
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lrlhf.process_guard import end_guarded, guarded
from lrlhf.rewards.function import RewardError

_CHUNK = 2**16
_TAIL = 2000
_MAX_REPLY = 16 * 10**6
_GRACE_S = 0.0
"""Between SIGTERM and SIGKILL."""
_SIGNALLED = 128
"""Added to the number of the signal that ended a process, in the exit status of its guard."""
_CHILD = Path(__file__).with_name("isolated_child.py")
_PASSED_ON = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH",
    "VIRTUAL_ENV", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM", "HF_HOME", "HF_HUB_OFFLINE",
)  # fmt: skip
"""Environment variables that a function may need and that hold no secrets."""


class WorkerError(Exception):
    """A process without a valid reply; it is gone, and a new one may do better."""


class Worker:
    """A process under a guard, which ends it with all that it started at the first failure.

    It is started when it is needed, and again after it was killed. Requests are pickles, as their
    content is the parent's; replies are JSON, as it is not. Each has the number of its request: a
    function may fork, and the fork, returning as well, would answer the next request too.

    Args:
        name: Of the function, for messages.
        function: Import path, ``file.py:name``, or the pickle of a function.
        memory_bytes: Address space that it may use on top of what it has mapped when its function
            is loaded; None: no limit.
        env: Names of more environment variables that it gets.
        start_timeout: Seconds to load the function.
    """

    def __init__(
        self,
        name: str,
        function: str | bytes,
        memory_bytes: int | None,
        env: tuple[str, ...],
        start_timeout: float,
    ) -> None:
        self._name, self._function, self._env = name, function, env
        self._memory_bytes, self._start_timeout = memory_bytes, start_timeout
        self._output = b""
        self._number = 0
        self._end: weakref.finalize[..., Worker] | None = None
        self.greeting: dict[str, Any] = {}
        """The process's report of its function."""

    @property
    def alive(self) -> bool:
        """Whether it can be sent requests."""
        return self._end is not None and self._end.alive

    def start(self, timeout: float = math.inf) -> None:
        """Start the process, if it does not run.

        Raises:
            WorkerError: It does not start in time, or dies.
            RewardError: The function cannot be loaded.
        """
        if self.alive:
            return
        self._spawn()
        path = [entry or str(Path.cwd()) for entry in sys.path]
        start = {"function": self._function, "path": path, "memory_bytes": self._memory_bytes}
        self.greeting = self._reply_to(start, min(timeout, self._start_timeout))
        if "error" in self.greeting:
            self.close()
            raise RewardError(
                f"{self._name!r} cannot be loaded in its process: {self.greeting['error']}"
            )

    def send(
        self, request: Mapping[str, Any], timeout: float, start_timeout: float = math.inf
    ) -> dict[str, Any]:
        """Send a request, and return the reply: an object with arbitrary content.

        Args:
            request: What can be pickled.
            timeout: Seconds.
            start_timeout: Seconds to start it first, where it does not run.

        Raises:
            WorkerError: No reply in time, none that can be read, or the process died; it is dead
                in each case, with all that it started.
            RewardError: The function raised one, or cannot be loaded.
        """
        self.start(start_timeout)
        reply = self._reply_to(request, timeout)
        if reply.get("kind") == "RewardError":
            raise RewardError(str(reply.get("message")))
        if reply.get("kind") == "MemoryError":  # it is of no further use
            self.close()
        return reply

    def _spawn(self) -> None:
        self._output = b""
        folder = tempfile.TemporaryDirectory(prefix="lrlhf-reward-", ignore_cleanup_errors=True)
        names = (*_PASSED_ON, *self._env)
        environment = {name: os.environ[name] for name in names if name in os.environ}
        environment |= {"TMPDIR": folder.name, "PYTHONUNBUFFERED": "1"}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        request_end, self._requests = os.pipe()
        self._replies, reply_end = os.pipe()
        self._printed, output_end = os.pipe()
        try:
            command = [sys.executable, "-P", str(_CHILD), str(request_end), str(reply_end)]
            self._process = subprocess.Popen(
                guarded(command, grace=_GRACE_S),
                pass_fds=(request_end, reply_end),
                stdin=subprocess.DEVNULL,
                stdout=output_end,
                stderr=output_end,
                cwd=folder.name,
                env=environment,
                start_new_session=True,
            )
        finally:
            for end in (request_end, reply_end, output_end):
                os.close(end)
        ends = (self._requests, self._replies, self._printed)
        os.set_blocking(self._requests, False)
        self._end = weakref.finalize(self, _end, self._process, folder, ends, os.getpid())

    def _reply_to(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        self._number += 1
        numbered = {**request, "number": self._number}
        try:
            reply = json.loads(self._exchange(pickle.dumps(numbered), timeout))
            if not isinstance(reply, dict):
                raise WorkerError(f"its reply is a JSON {type(reply).__name__}, not an object")
            if reply.pop("number", None) != self._number:
                raise WorkerError("it sent a reply to another request")
        except BaseException as error:
            self.close()  # a reply to an abandoned request would be taken for the next one's
            if not isinstance(error, WorkerError | ValueError | RecursionError):
                raise
            reason = str(error) if isinstance(error, WorkerError) else f"its reply: {error}"
            # what it printed last, and the reason in the last line
            printed = self._output.decode(errors="replace").strip()
            raise WorkerError(
                f"it printed last:\n{printed}\n{reason}" if printed else reason
            ) from None
        return reply

    def kill(self) -> None:
        """Kill the process, from another thread too: waiting for its reply then fails."""
        if self.alive:
            self._process.terminate()

    def close(self) -> None:
        """Kill the process and what it started, and remove its folder."""
        if self._end is not None:
            self._end()

    def _exchange(self, request: bytes, timeout: float) -> bytes:
        """Write and read as the process is ready for it; return one line."""
        deadline = time.monotonic() + timeout
        unsent, reply = memoryview(request), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._requests, selectors.EVENT_WRITE)
            selector.register(self._replies, selectors.EVENT_READ)
            selector.register(self._printed, selectors.EVENT_READ)
            while not reply.endswith(b"\n"):
                if (remaining := deadline - time.monotonic()) <= 0:
                    raise WorkerError(f"no result after {timeout:.3g} s")
                for key, _ in selector.select(remaining):
                    if key.fd == self._requests:
                        unsent = unsent[self._write(unsent) :]
                    elif key.fd == self._replies:
                        reply += self._read_reply(len(reply))
                    ended = key.fd == self._printed and not self._read_output()
                    if ended or (key.fd == self._requests and not unsent):
                        selector.unregister(key.fd)
        if reply.count(b"\n") > 1:
            raise WorkerError("it sent more than one reply")
        return bytes(reply)

    def _write(self, unsent: memoryview) -> int:
        try:
            return os.write(self._requests, unsent[:_CHUNK])
        except BrokenPipeError:
            raise WorkerError(self._exit_reason()) from None

    def _read_reply(self, length: int) -> bytes:
        content = os.read(self._replies, _CHUNK)
        if not content:
            raise WorkerError(self._exit_reason())
        if length + len(content) > _MAX_REPLY:
            raise WorkerError(f"its result is longer than {_MAX_REPLY} bytes")
        return content

    def _read_output(self) -> bytes:
        content = os.read(self._printed, _CHUNK)
        self._output = (self._output + content)[-_TAIL:]
        return content

    def _exit_reason(self) -> str:
        try:
            status = self._process.wait(1)
        except subprocess.TimeoutExpired:
            return "its process closed the connection"
        with selectors.DefaultSelector() as selector:  # its last output
            selector.register(self._printed, selectors.EVENT_READ)
            while selector.select(0) and self._read_output():
                pass
        if status < 0 or status > _SIGNALLED:  # the guard itself, or the process by its report
            number = -status if status < 0 else status - _SIGNALLED
            return f"its process was killed by {signal.Signals(number).name}"
        return f"its process ended with exit status {status}"


def _end(
    process: subprocess.Popen[bytes],
    folder: tempfile.TemporaryDirectory[str],
    ends: tuple[int, ...],
    owner: int,
) -> None:
    for end in ends:
        os.close(end)
    if os.getpid() != owner:  # in a fork of the owner, whose process it is not
        return
    end_guarded(process, grace=_GRACE_S)
    folder.cleanup()
