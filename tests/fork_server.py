"""A process that has imported the heavy libraries, and forks programs from there.

An import of all libraries takes as long as a whole tiny run. ``pytest --lanes`` starts one for the
session; `tests.forked.Popen` asks it for processes. What is lost: all of them share one seed of
Python's hashes.

A client connects and sends a line of JSON, ``{"arguments": …, "folder": …, "environment": …,
"session": …, "files": …}``, with the three standard streams. It is answered with a line that has
the process id, and when that process has ended with one that has its status, negative for a signal.
With `fork_for` there is one client, whose own children the processes become.
"""

import atexit
import contextlib
import gc
import json
import logging
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "lrlhf.cli.application",
    "peft",
    "datasets",
    "torchmetrics.functional",
    "matplotlib.backends.backend_agg",
)
_LONGEST_REQUEST = 2**20
Be = Callable[[dict[str, Any], list[int]], NoReturn]
"""What a forked process does with a request and open files."""


def import_deepspeed() -> None:
    """Import what each process would that saves a model; with a GPU it might set up CUDA."""
    torch = sys.modules.get("torch")
    if torch and find_spec("deepspeed") and not torch.cuda.is_available():
        logging.disable()  # it tells that there is no GPU
        import_module("deepspeed")
        logging.disable(logging.NOTSET)


def serve(listener: socket.socket) -> None:
    """Fork programs until the process that has started this one ends its standard input."""
    import_all(PRELOADED)
    # nobody waits for the processes that tell of the end of others
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    own = os.getpid()
    if os.fork() == 0:
        sys.stdin.read()
        if os.getppid() == own:
            os.kill(own, signal.SIGKILL)
        os._exit(0)
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _attend(client)
        client.close()


def import_all(names: Sequence[str]) -> None:
    """Import modules for the processes that will be forked."""
    for name in names:
        import_module(name)
    import_deepspeed()
    threads = threading.active_count()
    assert threads == 1, f"{threads} threads: none of them would be there after a fork"
    gc.freeze()  # what all share stays shared


def fork_for(client: socket.socket, be: Be) -> NoReturn:
    """Fork processes that become the client's children, which it must be ready to adopt."""
    while True:
        request, streams = _received(client)
        if not request:
            os._exit(0)
        between = os.fork()
        if between == 0:
            own, child = os.getpid(), os.fork()
            if child == 0:
                while os.getppid() == own:  # whose number a guard compares with its parent's
                    time.sleep(0.001)
                be(request, streams)
            client.sendall(str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)  # it is adopted
        client.sendall(b"\n")
        for stream in streams:
            os.close(stream)


def _received(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Read a request and its streams; it is empty if the client has gone."""
    try:
        message, streams, *_ = socket.recv_fds(client, _LONGEST_REQUEST, 3)
    except ConnectionResetError:  # it was killed before it had read all that it was told
        return {}, []
    while message and not message.endswith(b"\n"):
        message += client.recv(_LONGEST_REQUEST)
    return json.loads(message or "{}"), streams


def _attend(client: socket.socket) -> NoReturn:
    """Start a program, wait for it and tell of its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, streams = _received(client)
    child = os.fork()
    if child == 0:
        be_program(request, streams)
    for stream in streams:
        os.close(stream)
    try:
        client.sendall(f"{child}\n".encode())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        client.sendall(f"{status}\n".encode())
    finally:
        os._exit(0)


def be_program(request: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    """Be ``python arguments``."""
    status = 1
    try:
        if request["session"]:
            os.setsid()
        _part_from_parent([*streams, *request["files"]])
        for number, stream in enumerate([os.dup(stream) for stream in streams]):
            os.dup2(stream, number)
            os.close(stream)
        for number, name in ((1, "stdout"), (2, "stderr")):
            setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))
        sys.stdin = os.fdopen(0, closefd=False)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        _take_settings_of_the_interpreter()
        flag, name, *rest = request["arguments"]
        sys.argv = [name, *rest]
        if flag == "-m":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            exec(compile(name, "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001  the process ends here, whatever it is
        traceback.print_exc()
    finally:
        _leave(status)


def _part_from_parent(kept: Collection[int]) -> None:
    """Keep no open files but the standard ones and those given, and no handlers of signals."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in [int(path.name) for path in Path("/dev/fd").iterdir()]:
        if file > 2 and file not in (nothing, *kept):
            with contextlib.suppress(OSError):  # of the list itself
                os.fstat(file)
                # not closed: what has the number may close it, and then it must not be another's
                os.dup2(nothing, file, inheritable=False)


def _take_settings_of_the_interpreter() -> None:
    """Do what Python does at its start with variables of the environment."""
    paths = [str(Path.cwd()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    for action in reversed(os.environ.get("PYTHONWARNINGS", "").split(",")):
        if action:
            warnings.simplefilter(action)  # type: ignore[arg-type]


def _leave(status: int) -> NoReturn:
    """End as a program does: hooks at exit run, threads are waited for."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
