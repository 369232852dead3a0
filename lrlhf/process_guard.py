"""Runs a command and ends all its processes as soon as the process that started it is gone.

A function or server of others may fork, start sessions of its own and leave daemons behind: no
process group holds them. A script, which needs psutil only, see `guarded`:

    python process_guard.py TRAINER GRACE COMMAND...

TRAINER is the process id of the parent, GRACE the seconds between SIGTERM and SIGKILL. The command
and all its descendants end when the trainer is gone, when the guard gets SIGTERM, SIGINT or SIGHUP,
and when the command itself ended. The guard exits once none is left: with the command's code if
that ended by itself (128 + n after signal n), 128 + n if the guard got signal n, else with 0.

On Linux the guard adopts orphans, so that no descendant can leave it. The command inherits the
open files of the guard.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
LOOK_SECONDS = 0.2
"""How often the guard checks whether the trainer and the command are alive."""
TRACKER_SECONDS = 0.5
"""How long a resource tracker may outlive the others, to remove their shared memory."""
_KILL_SECONDS = 10.0
"""How long processes may take to end after SIGKILL."""


def guarded(command: Sequence[str], *, grace: float) -> list[str]:
    """Return the command line of a guard of this process; see `end_guarded`.

    Args:
        command: To be guarded.
        grace: Seconds between SIGTERM and SIGKILL.
    """
    # isolated, as the environment is the command's, but with this process's packages
    script = (
        f"import runpy, sys; sys.path[:] = {list(map(str, sys.path))!a}; "
        f"runpy.run_path({__file__!a}, run_name='__main__')"
    )
    return [sys.executable, "-I", "-c", script, str(os.getpid()), str(grace), *command]


def end_guarded(guard: subprocess.Popen[bytes], *, grace: float) -> int:
    """End a guard and its processes; returns the guard's code when none of them is left.

    Args:
        guard: Started from the command line of `guarded`, in a session of its own.
        grace: As there.

    Raises:
        RuntimeError: The guard was killed, and its processes do not even end on SIGKILL.
    """
    guard.terminate()
    left: list[psutil.Process] = []
    try:
        code = guard.wait(grace + _KILL_SECONDS)
    except subprocess.TimeoutExpired:  # it was stopped
        left = descendants(guard.pid)
        guard.kill()
        code = guard.wait()
    send_signal(left, signal.SIGKILL)
    if code < 0:  # it was killed and could end nothing, but its process group has its number
        deadline = time.monotonic() + _KILL_SECONDS
        while members := _living_members(guard.pid):
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {members} do not end on SIGKILL")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(guard.pid, signal.SIGKILL)
            time.sleep(0.02)
    return code


def _living_members(group: int) -> list[int]:
    """List the processes of a group, without zombies."""
    living = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it ended in this moment
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process.pid)
    return living


def descendants(pid: int) -> list[psutil.Process]:
    """List the living processes that a process started, and all that these started."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    living = []
    for process in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def send_signal(processes: Iterable[psutil.Process], number: int) -> None:
    """Signal processes some of which may have ended, or become another user's."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def adopt_orphans() -> None:
    """Have processes become this one's children when their own parent ends; on Linux only."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_descendants(grace: float) -> None:
    """End all that this process and those below it have started; returns when none is left.

    Args:
        grace: Seconds between SIGTERM and SIGKILL.
    """
    send_signal(descendants(os.getpid()), signal.SIGTERM)
    deadline = time.monotonic() + grace
    while left := descendants(os.getpid()):
        late = time.monotonic() - deadline
        if late > 0:
            spares = late < TRACKER_SECONDS
            killed = [each for each in left if not (spares and _is_resource_tracker(each))]
            send_signal(killed, signal.SIGKILL)
        time.sleep(0.05)
    with contextlib.suppress(ChildProcessError):
        while True:  # no zombie is left for the next parent
            os.waitpid(-1, 0)


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Whether it is Python's resource tracker, which removes the shared memory of the killed."""
    with contextlib.suppress(psutil.Error):
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    return False


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(option, value, 0, 0, 0) != 0:
        raise OSError("prctl failed")


def _die_with_guard() -> None:
    # a guard that is killed takes at least the command along
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _code_of(child: subprocess.Popen[bytes]) -> int | None:
    """Collect ended processes, adopted orphans too; returns the command's code if it has ended."""
    while child.returncode is None:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode


def main(trainer: int, grace: float, command: Sequence[str]) -> int:
    """Guard a command; returns the guard's exit code once no process of it is left."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda order, _: received.append(order))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wake_read, wake_write = os.pipe()  # by signals, which a sleep would outlast
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake_write)
    adopt_orphans()
    # the guard has one thread, so that a function may run between fork and exec
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_guard, close_fds=False
    )
    while (code := _code_of(child)) is None and not received and os.getppid() == trainer:
        select.select([wake_read], [], [], LOOK_SECONDS)
        with contextlib.suppress(BlockingIOError):
            os.read(wake_read, 4096)
    end_descendants(grace)
    if code is None:
        return 128 + received[0] if received else 0
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
