"""``subprocess.Popen`` for ``[sys.executable, "-m", …]`` and ``"-c"``, without the imports.

Where `tests.fork_server` runs, which ``pytest --lanes`` starts, a program is forked from it; else
it is a new interpreter, as is any command that is no Python program of those kinds. ``wait``,
``poll``, ``communicate``, signals and pipes are as of ``subprocess.Popen``; the process is nobody's
child here.

After `fork_programs`, which ``pytest --lanes`` calls for tests of vLLM when it is imported,
``subprocess.Popen`` itself forks programs for whoever calls it, and they are children: a server of
vLLM, its guard and its workers are the processes that a user has, but none imports vLLM.
"""

import atexit
import contextlib
import ctypes
import json
import multiprocessing.util
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from lrlhf.process_guard import PR_SET_CHILD_SUBREAPER
from tests.fork_server import Be, be_program, fork_for

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
    return known and ADDRESS in os.environ and subprocess.Popen is NewProgram


def _request(
    arguments: Sequence[Any],
    folder: Any,
    environment: Mapping[str, str] | None,
    *,
    session: bool = False,
    files: Sequence[int] = (),
) -> dict[str, Any]:
    return {
        "arguments": [str(argument) for argument in arguments],
        "folder": str(folder or Path.cwd()),
        "environment": dict(os.environ if environment is None else environment),
        "session": session,
        "files": list(files),
    }


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
        request = _request(args[1:], cwd, env, session=start_new_session)
        _send(self._server, request, [given, output, errors])
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


def _send(server: socket.socket, request: dict[str, Any], files: Sequence[int]) -> None:
    message = json.dumps(request).encode() + b"\n"
    sent = socket.send_fds(server, [message], files)
    server.sendall(message[sent:])


class Forker:
    """A fork of this process, which forks others from the state that it has now.

    Args:
        be: What they do.
        prepare: Called once, before the first one.
    """

    def __init__(self, be: Be, prepare: Callable[[], object] = lambda: None) -> None:
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._is_ready = False
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._socket.close()
                prepare()
                theirs.sendall(b"\n")
                fork_for(theirs, be)
            except BaseException:  # noqa: BLE001  the process ends here, whatever it is
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(1)
        theirs.close()

    def fork(self, request: dict[str, Any], files: Sequence[int]) -> int:
        """Return the number of a process, which is this one's child."""
        with self._lock:
            # only then, as all orphans are adopted meanwhile
            self._is_ready = self._is_ready or self._line() == b"\n"
            _adopt_orphans(True)
            _send(self._socket, request, files)
            pid = int(self._line())
            _adopt_orphans(False)
        return pid

    def _line(self) -> bytes:
        told = b""
        while not told.endswith(b"\n"):
            part = self._socket.recv(64)
            assert part, "the process that forks others has ended"
            told += part
        return told

    def end(self) -> None:
        self._socket.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _adopt_orphans(yes: bool) -> None:
    """Have processes become this one's children when their own parent ends, or not any more."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0) == 0


NewProgram = subprocess.Popen
_forker: Forker | None = None
_spawn = multiprocessing.util.spawnv_passfds


def fork_programs() -> None:
    """Fork Python programs from the state that this process, with one thread, has now.

    They fork theirs by themselves, as long as they have one thread.
    """
    global _forker
    subprocess.Popen = _Child  # type: ignore[misc]
    multiprocessing.util.spawnv_passfds = _spawned  # type: ignore[attr-defined]
    _forker = Forker(_be_program)


def _be_program(request: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    global _forker
    _forker = None
    atexit._clear()  # pytest would remove folders
    warnings.simplefilter("ignore")  # which pytest makes errors
    be_program(request, streams)


def _program(command: Sequence[Any]) -> list[Any] | None:
    """Return ``-m NAME …`` or ``-c CODE …``, without other options of the interpreter."""
    if command and command[0] == sys.executable:
        for index, word in enumerate(command[1:], 1):
            if word in ("-m", "-c"):
                return list(command[index:])
            if not str(word).startswith("-"):
                break
    return None


class _Child(subprocess.Popen[Any]):
    """A child process, which is forked if it is a Python program that needs nothing else."""

    def _execute_child(  # type: ignore[no-untyped-def]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
    ) -> None:
        pipes, (*_, session, _) = rest[3:9], rest
        program = None if isinstance(args, str) or executable or pass_fds else _program(args)
        if program is None or (_forker is None and threading.active_count() > 1):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
            )
            return
        request = _request(program, cwd, env, session=session)
        ends = enumerate((pipes[0], pipes[3], pipes[5]))
        streams = [number if end == -1 else end for number, end in ends]
        if _forker is not None:
            self.pid = _forker.fork(request, streams)
        else:
            self.pid = _fork_here(request, streams, preexec_fn)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _fork_here(
    request: dict[str, Any], streams: Sequence[int], prepare: Callable[[], object] | None = None
) -> int:
    child = os.fork()
    if child == 0:
        if prepare is not None:
            prepare()
        atexit._clear()
        # imported anew, as in a new process: lrlhf registers with vLLM on import
        for name in [*sys.modules]:
            if name.partition(".")[0] in ("lrlhf", "tests"):
                del sys.modules[name]
        be_program(request, streams)
    return child


def _spawned(path: Any, command: Sequence[Any], files: Sequence[int]) -> int:
    """Start a process of ``multiprocessing``, but not its tracker, which is small."""
    program = _program([sys.executable, *command[1:]])
    small = program is None or "resource_tracker" in program[1]
    if small or _forker is not None or threading.active_count() > 1:
        number: int = _spawn(path, command, files)
        return number
    return _fork_here(_request(program, None, None, files=[*map(int, files)]), (0, 1, 2))


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
