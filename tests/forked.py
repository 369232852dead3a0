"""``subprocess.Popen`` for ``[sys.executable, "-m", …]`` and ``"-c"``, without the imports.

Where `tests.fork_server` runs, which ``pytest --lanes`` starts, a program is forked from it; else
it is a new interpreter, as is any command that is no Python program of those kinds. ``wait``,
``poll``, ``communicate``, signals and pipes are as of ``subprocess.Popen``; the process is nobody's
child here.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ADDRESS = "LRLHF_FORK_SERVER"
_ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def fork_server(folder: Path) -> Iterator[None]:
    """Run a server for the processes that are forked inside; they find it in the environment."""
    path = str(folder / "fork_server")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        number = listener.fileno()
        command = [sys.executable, "-W", "ignore", "-m", "tests.fork_server", str(number)]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=_ROOT, pass_fds=[number])
    with server:
        os.environ[ADDRESS] = path
        try:
            yield
        finally:
            del os.environ[ADDRESS]
            server.kill()


def _is_forkable(command: Sequence[str]) -> bool:
    known = len(command) > 2 and command[0] == sys.executable and command[1] in ("-m", "-c")
    return known and ADDRESS in os.environ


class _Forked:
    """What tests use of ``subprocess.Popen``, of a process that another one waits for."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        text: bool = False,
        start_new_session: bool = False,
    ) -> None:
        self.args = list(args)
        self.returncode: int | None = None
        self._told = b""
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(os.environ[ADDRESS])
        mode = "" if text else "b"
        given, self.stdin = _stream(stdin, 0, f"w{mode}")
        output, self.stdout = _stream(stdout, 1, f"r{mode}")
        errors, self.stderr = (
            (output, None) if stderr == subprocess.STDOUT else _stream(stderr, 2, f"r{mode}")
        )
        request = {
            "arguments": [str(argument) for argument in args[1:]],
            "folder": str(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "session": start_new_session,
        }
        message = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(self._server, [message], [given, output, errors])
        self._server.sendall(message[sent:])
        for stream in {given, output, errors}:
            os.close(stream)
        self.pid = int(self._line(None) or 0)

    def _line(self, timeout: float | None) -> str | None:
        """Read a line of the server's; None: there is none in that time."""
        while b"\n" not in self._told:
            if not select.select([self._server], [], [], timeout)[0]:
                return None
            self._told += self._server.recv(64) or b"-9\n"  # the server was killed, and all with it
        line, _, self._told = self._told.partition(b"\n")
        return line.decode()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            line = self._line(timeout)
            if line is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(line)
            self._server.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        if self.stdin is not None:
            self.stdin.close()
        late = threading.Timer(timeout or threading.TIMEOUT_MAX, self.kill)
        late.start()
        with ThreadPoolExecutor(2) as readers:
            told = readers.map(lambda stream: stream and stream.read(), (self.stdout, self.stderr))
            output, errors = told
        self.wait()
        if timeout is not None and late.finished.is_set():
            raise subprocess.TimeoutExpired(self.args, timeout)
        late.cancel()
        return output, errors

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> "_Forked":
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


def _stream(given: Any, number: int, mode: str) -> tuple[int, Any]:
    """Return the program's end of a stream, and for a pipe ours."""
    if given == subprocess.PIPE:
        reading, writing = os.pipe()
        ours, theirs = (writing, reading) if number == 0 else (reading, writing)
        return theirs, os.fdopen(ours, mode)
    if given == subprocess.DEVNULL:
        return os.open(os.devnull, os.O_RDWR), None
    return os.dup(
        number if given is None else given if isinstance(given, int) else given.fileno()
    ), None


def Popen(args: Sequence[str], **options: Any) -> Any:  # noqa: N802  in the place of a class
    """Start a program, see ``subprocess.Popen``."""
    return _Forked(args, **options) if _is_forkable(args) else subprocess.Popen(args, **options)


def run(
    args: Sequence[str],
    *,
    capture_output: bool = False,
    check: bool = False,
    timeout: float | None = None,
    **options: Any,
) -> "subprocess.CompletedProcess[Any]":
    """Run a program to its end, see ``subprocess.run``."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(args, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(args, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done
