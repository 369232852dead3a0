"""A process that has imported the heavy libraries, and forks programs from there.

An import of all libraries takes as long as a whole tiny run. ``pytest --lanes`` starts one for the
session; `tests.forked.Popen` asks it for processes. What is lost: all of them share one seed of
Python's hashes.

A client connects and sends a line of JSON, ``{"arguments": …, "folder":
…, "environment": …, "session": …}``, with the three standard streams. It is answered with a line
that has the process id, and when that process has ended with one that has its status, negative for
a signal.
"""

import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "lrlhf.cli.application",
    "lrlhf.cli.commands",
    "lrlhf.modules",
    "lrlhf.datamodules",
    "peft",
    "datasets",
    "torchmetrics.functional",
    "matplotlib.backends.backend_agg",
)
_LONGEST_REQUEST = 2**20


def serve(listener: socket.socket) -> None:
    """Fork programs until the process that has started this one ends its standard input."""
    for name in PRELOADED:
        import_module(name)
    threads = threading.active_count()
    assert threads == 1, f"{threads} threads: none of them would be there after a fork"
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


def _attend(client: socket.socket) -> NoReturn:
    """Start a program, wait for it and tell of its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, streams, *_ = socket.recv_fds(client, _LONGEST_REQUEST, 3)
    while not message.endswith(b"\n"):
        message += client.recv(_LONGEST_REQUEST)
    child = os.fork()
    if child == 0:
        client.close()
        _be(json.loads(message), streams)
    for stream in streams:
        os.close(stream)
    try:
        client.sendall(f"{child}\n".encode())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        client.sendall(f"{status}\n".encode())
    finally:
        os._exit(0)


def _be(request: dict[str, Any], streams: list[int]) -> NoReturn:
    """Be ``python arguments``."""
    status = 1
    try:
        if request["session"]:
            os.setsid()
        for number, stream in enumerate(streams):
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
        import_module("atexit")._run_exitfuncs()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
