"""Breaks lrlhf on purpose, one defect at a time, and runs the test that must notice.

`make mutations` runs it. Every file of ``tools/mutations`` lists defects::

    [[mutation]]
    name = "the loss counts the padding"
    file = "lrlhf/functional/masking.py"
    old = '''exact text, which occurs once in the file'''
    new = '''what stands there instead'''
    tests = "tests/functional/test_masking.py::test_padding_does_not_count"
    slow = true                                     # optional: only with --slow

The defects are made in copies of the repository, so the tree stays as it is whatever happens, and
what is not committed is tested too. The tests run in forks of a process that has imported the heavy
libraries, but nothing of lrlhf. They end with the runner, whatever ends it.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import ctypes
import gc
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, NoReturn, TextIO

import psutil

HEAVY = ("torch", "transformers", "lightning", "peft", "datasets", "torchmetrics")
PLUGINS = ("anyio.pytest_plugin", "hypothesis", "jaxtyping", "beartype")
"""Each pytest imports them, in up to a second."""
LIMIT = 600.0
"""Seconds of a test; one that hangs because of the defect has noticed it."""
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Mutation(NamedTuple):
    """A defect, and the test that must notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    slow: bool = False
    area: str = ""

    def mutated(self, root: Path) -> str | None:
        """Return the file's text with the defect; None where the old text is not found once."""
        path = root / self.file
        text = path.read_text() if path.is_file() else ""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


def read(folder: Path, *, slow: bool, only: str = "") -> list[Mutation]:
    """Read the mutations of all files, those whose area or name contains ``only``."""
    found = [
        Mutation(**entry, area=path.stem)
        for path in sorted(folder.glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["mutation"]
    ]
    return [
        mutation
        for mutation in found
        if (slow or not mutation.slow) and (only in mutation.name or only in mutation.area)
    ]


def copy(root: Path, folder: Path) -> None:
    """Copy the working tree's files, those that git ignores left out."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    # by content: files are changed and changed back within the resolution of their times
    checked = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(folder, quiet=2, invalidation_mode=checked)


class Job(NamedTuple):
    """Tests that run in a copy, with a defect or, as None, without any."""

    mutation: Mutation | None
    folder: Path
    log: Path
    started: float

    def restore(self, root: Path) -> None:
        """Take the defect out of the copy."""
        if self.mutation is not None:
            shutil.copy2(root / self.mutation.file, self.folder / self.mutation.file)


def _be(folder: Path, tests: Sequence[str], log: Path, runner: int) -> NoReturn:
    status = 3
    try:
        if sys.platform == "linux":  # the runner may be killed and end nothing itself
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != runner:
            sys.exit("the runner has ended")
        for ending in ENDING:
            own = signal.default_int_handler if ending == signal.SIGINT else signal.SIG_DFL
            signal.signal(ending, own)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = str(folder)
        sys.dont_write_bytecode = True
        scratch = f"--basetemp={log.with_suffix('.tmp')}"
        options = ["-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), scratch]
        # what is imported already is not under test
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        status = int(import_module("pytest").main([*options, *tests]))
    except BaseException:  # noqa: BLE001  the process ends here, whatever it is
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def verdict(status: int | None) -> str:
    """Say what a status of pytest means: 1 for failures, None for a test that hangs.

    What cannot even be imported proves nothing of the test.
    """
    return {None: "caught", 0: "MISSED", 1: "caught"}.get(status, "BROKEN")


class Campaign:
    """Mutations in some copies at a time.

    Args:
        root: The repository.
        scratch: Holds the copies and the logs.
        jobs: So many copies.
    """

    def __init__(self, root: Path, scratch: Path, jobs: int) -> None:
        self._root = root
        self._scratch = scratch
        self._copies = [scratch / f"copy{number}" for number in range(jobs)]
        self._running: dict[int, Job] = {}
        self.logs: dict[Mutation, Path] = {}
        for folder in self._copies:
            copy(root, folder)

    def passes_unbroken(self, mutations: Iterable[Mutation]) -> bool:
        """Tell whether all tests pass without any defect; says what fails."""
        tests = sorted({mutation.tests for mutation in mutations})
        log = self._scratch / "unbroken.log"
        pid = self._start(Job(None, self._copies.pop(), log, time.monotonic()), tests)
        _, status = os.waitpid(pid, 0)
        self._end(pid, reap=False)
        if status != 0:
            sys.stdout.write(log.read_text(errors="replace"))
        return status == 0

    def run(self, mutations: Sequence[Mutation], tell: Callable[[Mutation, str], None]) -> None:
        """Try one after another, and tell the verdict of each."""
        for number, mutation in enumerate(mutations):
            text = mutation.mutated(self._root)
            if text is None:
                tell(mutation, "STALE")
                continue
            if not self._copies:
                self._wait(tell)
            job = Job(
                mutation,
                self._copies.pop(),
                self._scratch / f"{number}.log",
                time.monotonic(),
            )
            (job.folder / mutation.file).write_text(text)
            self.logs[mutation] = job.log
            self._start(job, [mutation.tests])
        while self._running:
            self._wait(tell)

    def _start(self, job: Job, tests: Sequence[str]) -> int:
        """Run tests in a forked process; returns its id."""
        sys.stdout.flush()
        runner = os.getpid()
        # no signal may end the runner before it knows the process, nor reach its handler there
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        pid = os.fork()
        if pid == 0:
            _be(job.folder, tests, job.log, runner)
        self._running[pid] = job
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        return pid

    def _wait(self, tell: Callable[[Mutation, str], None]) -> None:
        """Wait until a test ends."""
        while True:
            for pid, job in list(self._running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                late = time.monotonic() - job.started > LIMIT
                if ended or late:
                    self._end(pid, reap=not ended)
                    assert job.mutation is not None
                    tell(
                        job.mutation, verdict(os.waitstatus_to_exitcode(status) if ended else None)
                    )
                    return
            time.sleep(0.05)

    def _end(self, pid: int, *, reap: bool) -> None:
        """End a process and whatever its tests have started, in sessions of their own too."""
        job = self._running[pid]
        started = psutil.Process(pid).children(recursive=True) if reap else []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if reap:
            os.waitpid(pid, 0)
        del self._running[pid]
        job.restore(self._root)
        self._copies.append(job.folder)

    def close(self) -> None:
        """End what runs."""
        for pid in list(self._running):
            self._end(pid, reap=True)


@contextlib.contextmanager
def campaign(root: Path, jobs: int) -> Iterator[Campaign]:
    """Make the copies, and remove them at the end."""
    with tempfile.TemporaryDirectory(prefix="lrlhf-mutations-") as scratch:
        made = Campaign(root, Path(scratch), jobs)
        try:
            yield made
        finally:
            made.close()


def _exit(number: int, _: object) -> NoReturn:
    for ending in ENDING:  # once is enough, and a second one would break off the cleaning up
        signal.signal(ending, signal.SIG_IGN)
    sys.exit(128 + number)


def main(
    arguments: Sequence[str] | None = None,
    *,
    root: Path = Path(__file__).parents[1],
    imports: Iterable[str] = (*HEAVY, *PLUGINS),
    out: TextIO = sys.stdout,
) -> int:
    """Try all mutations; returns 1 if any is not caught."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="of this area, or with this in their name")
    parser.add_argument("--slow", action="store_true", help="those whose tests are slow as well")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time")
    options = parser.parse_args(arguments)
    mutations = read(root / "tools/mutations", slow=options.slow, only=options.only)
    for ending in ENDING:
        signal.signal(ending, _exit)
    for name in imports:
        import_module(name)
    gc.collect()
    gc.freeze()  # each pytest collects five times; over all this it took two seconds
    verdicts: dict[Mutation, str] = {}
    with campaign(root, options.jobs) as tried:
        if not tried.passes_unbroken(mutations):
            out.write("these tests must pass before anything is broken\n")
            return 1

        def tell(mutation: Mutation, said: str) -> None:
            verdicts[mutation] = said
            out.write(f"{said}  {mutation.area}: {mutation.name}\n")
            if said == "BROKEN":
                out.write(tried.logs[mutation].read_text(errors="replace")[-2000:])
            out.flush()

        tried.run(mutations, tell)
    counted = Counter(verdicts.values())
    out.write(", ".join(f"{number} {said}" for said, number in sorted(counted.items())) + "\n")
    return 0 if set(counted) <= {"caught"} else 1


if __name__ == "__main__":
    sys.exit(main())
