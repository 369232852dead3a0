"""Runs a command and ends all its processes as soon as the process that asked for it is gone.

A script for the standard library alone, run by its path:

    python -I -S guard.py TRAINER GRACE -- COMMAND...

TRAINER is the process id of the parent, GRACE the seconds between SIGTERM and SIGKILL. The guard
ends the command and all its descendants when

- its stdin reaches end of file or its parent is no longer TRAINER: the trainer is gone,
- a line on stdin asks for it; the line is the grace in seconds, the shortest one asked for counts,
- it gets SIGTERM, SIGINT or SIGHUP,
- the command ended: what it leaves behind ends too.

It exits when no descendant is left: with the command's code if that ended by itself (128 + n after
signal n), else with 143. Its stdout says the same sooner: a line with the code when the command
ended by itself, end of file when it ended at all. The command's own output goes to stderr.

Descendants are found through their parents, and on Linux, where the guard adopts orphans, none can
leave that way. On other systems an orphan is found as long as it stays in the guard's session.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

STDIN, STDOUT, STDERR = 0, 1, 2
PROC = Path("/proc")
ADOPTS_ORPHANS = sys.platform == "linux"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
LOOK_SECONDS = 0.5
"""How often the guard looks whether the trainer is still its parent."""
TRACKER_SECONDS = 0.5
"""How long a resource tracker may outlive the others, to remove their shared memory."""


class Process(NamedTuple):
    """A line of the process table."""

    parent: int
    session: int
    zombie: bool


def process_table() -> dict[int, Process]:
    """Read the processes of this machine, by process id."""
    return _table_from_proc() if (PROC / "self/stat").exists() else _table_from_ps()


def _table_from_proc() -> dict[int, Process]:
    table = {}
    for folder in PROC.glob("[0-9]*"):
        # gone since the listing, or another user's and hidden
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            # the name in parentheses may contain anything, parentheses and line ends too
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            state, parent, _, session = fields[:4]
            table[int(folder.name)] = Process(int(parent), int(session), state == b"Z")
    return table


def _table_from_ps() -> dict[int, Process]:
    command = ["ps", "-A", "-o", "pid=,ppid=,stat="]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as ps:
        lines = ps.communicate()[0].splitlines()
    table = {}
    for line in lines:
        pid, parent, state = line.split()[:3]
        # gone since the listing, as ps itself is
        with contextlib.suppress(ProcessLookupError, PermissionError):
            table[int(pid)] = Process(int(parent), os.getsid(int(pid)), state.startswith("Z"))
    return table


def members(guard: int, table: dict[int, Process]) -> set[int]:
    """Find what a guard has to end: its session, all descendants of it, without the guard."""
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    found = {guard}
    queue = [guard, *(pid for pid, process in table.items() if process.session == guard)]
    while queue:
        pid = queue.pop()
        found.add(pid)
        queue += [child for child in children.get(pid, []) if child not in found]
    return found - {guard}


def send_signal(pids: set[int], number: int) -> None:
    """Signal processes some of which may have ended."""
    for pid in pids:
        # PermissionError: it became another user's; the caller sees that it lives on
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def is_resource_tracker(pid: int) -> bool:
    """Tell Python's resource tracker, which removes the shared memory of those who were killed."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        return b"multiprocessing.resource_tracker" in (PROC / f"{pid}/cmdline").read_bytes()
    return False


def _prctl(option: int, value: int) -> None:
    if ADOPTS_ORPHANS and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def _die_with_guard() -> None:
    # a guard that is killed takes at least the command along
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _say(text: str) -> None:
    # a full disk must not end the guard
    with contextlib.suppress(OSError):
        os.write(STDERR, f"guard: {text}\n".encode())


def _tell(code: int) -> None:
    # the trainer may be gone
    with contextlib.suppress(BrokenPipeError):
        os.write(STDOUT, f"{code}\n".encode())


def _wake_on_signals() -> int:
    """Make signals readable from the returned file descriptor."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return reader


class Guard:
    """Waits for a reason to end a command, and ends it.

    Args:
        command: Program and arguments; starts at once, in a process group of its own.
        trainer: Process id of the parent.
        grace: Seconds between SIGTERM and SIGKILL when nobody asks for another time.
    """

    def __init__(self, command: Sequence[str], *, trainer: int, grace: float) -> None:
        self._trainer = trainer
        self._grace = grace
        self._deadline = math.inf
        self._code: int | None = None
        self._signals = _wake_on_signals()
        self._selector = selectors.DefaultSelector()
        self._selector.register(STDIN, selectors.EVENT_READ)
        self._selector.register(self._signals, selectors.EVENT_READ)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        # the guard has one thread, so that a function may run between fork and exec
        self._command = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=STDERR,
            process_group=0,
            preexec_fn=_die_with_guard,
        )

    def run(self) -> int:
        """Return the exit code when no process is left."""
        pause = 0.01
        try:
            while self._reap():
                left = self._deadline - time.monotonic()
                if left <= 0:
                    self._kill()
                    # what SIGKILL does not end waits for a device: look ever less often
                    left = pause = 2 * pause
                self._listen(min(LOOK_SECONDS, left))
        finally:
            self._kill()
        return 128 + signal.SIGTERM if self._code is None else self._code

    def _reap(self) -> bool:
        """Collect what ended; False when nothing is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                # without adoption an orphan is nobody's child here, but of the session
                return not ADOPTS_ORPHANS and bool(self._living())
            if pid == 0:
                return True
            if pid == self._command.pid:
                self._command_ended(os.waitstatus_to_exitcode(status))

    def _command_ended(self, code: int) -> None:
        self._command.returncode = code  # Popen must not wait for it again
        if self._deadline == math.inf:
            self._code = code if code >= 0 else 128 - code
            _tell(self._code)
        os.dup2(STDERR, STDOUT)
        if not ADOPTS_ORPHANS:
            # from here on only ps is a child, and would wake the loop that starts it
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._end(self._grace, f"the command ended with code {code}")

    def _listen(self, seconds: float) -> None:
        """Wait for signals, orders and the end of the trainer."""
        for key, _ in self._selector.select(seconds):
            data = os.read(key.fd, 4096)
            if key.fd == self._signals:
                for number in set(data) - {signal.SIGCHLD}:
                    self._end(self._grace, f"got {signal.Signals(number).name}")
            elif data:
                self._end(min(float(line) for line in data.split()), "asked to end")
            else:
                self._selector.unregister(STDIN)
                self._end(self._grace, "the trainer is gone")
        if os.getppid() != self._trainer:
            self._end(self._grace, "the trainer is gone")

    def _end(self, grace: float, reason: str) -> None:
        """Begin to end, or, if that has begun, bring the end forward."""
        if self._deadline == math.inf:
            _say(reason)
            send_signal(members(os.getpid(), process_table()), signal.SIGTERM)
        self._deadline = min(self._deadline, time.monotonic() + grace)

    def _kill(self) -> None:
        found = members(os.getpid(), process_table())
        if time.monotonic() < self._deadline + TRACKER_SECONDS:
            found = {pid for pid in found if not is_resource_tracker(pid)}
        send_signal(found, signal.SIGKILL)

    def _living(self) -> set[int]:
        table = process_table()
        return {pid for pid in members(os.getpid(), table) if not table[pid].zombie}


def main(arguments: Sequence[str]) -> int:
    """Guard the command after ``--``."""
    split = list(arguments).index("--")
    trainer, grace = arguments[:split]
    command = arguments[split + 1 :]
    try:
        guard = Guard(command, trainer=int(trainer), grace=float(grace))
    except OSError as error:
        # the name only: an argument may be secret
        _say(f"cannot start {command[0]}: {error.strerror}")
        _tell(127)
        return 127
    return guard.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
