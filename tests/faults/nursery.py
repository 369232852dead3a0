"""A process that has imported everything, and forks one run after another.

An import of all libraries takes as long as a whole tiny run. What is lost: the forked runs share
one seed of Python's hashes, so an order that depends on it shows only in processes of their own,
which ``make soak`` starts.

Each line of its input is a request, ``{"folder": …, "arguments": […], "environment": {…}, "log":
…}``; it answers with a line that has the process id, and when that process has ended with a line
that has its status, negative for a signal.
"""

import json
import os
import sys
import traceback
from importlib import import_module
from typing import Any


def serve() -> None:
    """Answer requests until the input ends."""
    # the protocol keeps the real output; whatever a library prints goes to the errors
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import_module("lrlhf.cli")
    import_module("tests.faults.kill_points")
    answers.write("ready\n")
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(request)
        answers.write(f"{child}\n")
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answers.write(f"{status}\n")


def _run(request: dict[str, Any]) -> None:
    """Be the run; never returns."""
    os.setsid()
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    status = 70
    try:
        status = import_module("lrlhf.__main__").main(request["arguments"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        # what nothing in the run has caught; told here, as the process ends right away
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # nothing of the process that it was forked from is its own to clean up
        os._exit(status)


if __name__ == "__main__":
    serve()
