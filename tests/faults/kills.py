"""Kills runs at any instant, continues them, and compares their ends with undisturbed ones.

    python -m tests.faults.kills --work FOLDER --case ppo --kills time:0.613,optimizer@7

The instants are those of `tests.faults.kill_points`, and ``time:0.613``: from outside, when so much
of the way is done that a process has before it when its training begins.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.faults.cases import CASES, Case, Stage
from tests.faults.processes import BrokenRunError, Course, Fresh, Nursery, Process, Starter


@dataclass
class Outcome:
    """What became of one run that was killed and continued."""

    case: str
    kills: list[str]
    """Instants, in order, one per process."""
    reached: list[str] = field(default_factory=list)
    """The last mark of each killed process."""
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        return not self.differences

    def repeat(self, work: Path) -> str:
        """Return the command that does the same again."""
        kills = ",".join(self.kills)
        return f"python -m tests.faults.kills --work {work} --case {self.case} --kills '{kills}'"


@dataclass
class Harness:
    """Runs cases below one folder.

    Args:
        work: Has the models, the undisturbed runs and, while they last, the killed ones.
        keep: Leave equal runs on disk too.
        starter: Starts the processes.
    """

    work: Path
    keep: bool = False
    starter: Starter = field(default_factory=Fresh)

    def __post_init__(self) -> None:
        self.work = self.work.resolve()
        self._stage = Stage(self.work / "stage")

    def undisturbed(self, case: Case) -> tuple[Path, Course]:
        """Run a case to its end, once; returns its folder and its course."""
        folder = self.work / case.name / "whole"
        told = folder / "course.json"
        if not told.exists():
            self._stage.build()
            _clear(folder)
            self._stage.write_config(case, folder / "config.yaml")
            process = Process(folder, self.starter, resumes=False)
            process.wait_for_marks()
            start = time.monotonic()
            process.wait_for_end()
            told.write_text(json.dumps([process.marks, time.monotonic() - start]))
        return folder / "run", Course(*json.loads(told.read_text()))

    def disturbed(self, case: Case, kills: Sequence[str], *, name: str = "killed") -> Outcome:
        """Run a case with kills, and compare its end with that of the undisturbed run."""
        whole, course = self.undisturbed(case)
        outcome = Outcome(case.name, list(kills))
        folder = self.work / case.name / name
        _clear(folder)
        self._stage.write_config(case, folder / "config.yaml")
        start = time.monotonic()
        for number, kill in enumerate(kills):
            process = Process(
                folder,
                self.starter,
                resumes=number > 0,
                kill="" if _by_time(kill) else kill,
            )
            outcome.reached.append(_killed(process, kill, course))
        process = Process(folder, self.starter, resumes=True)
        process.wait_for_end()
        # torch is not needed before there is something to compare
        from tests.faults.compare import differences  # noqa: PLC0415

        outcome.differences = differences(whole, folder / "run")
        outcome.seconds = time.monotonic() - start
        if outcome.equal and not self.keep:
            _clear(folder)
        return outcome


def _by_time(kill: str) -> bool:
    return kill.startswith("time:")


def _killed(process: Process, kill: str, course: Course) -> str:
    """Let a run go on until its kill, and return the last mark before it."""
    if _by_time(kill):
        process.wait_for_marks()
        process.kill_within(float(kill.removeprefix("time:")), course)
    status = process.wait()
    process.wait_for_others()
    if status >= 0 and not (_by_time(kill) and status == 0):
        raise BrokenRunError(
            f"the run was to be killed at {kill}, and ended by itself with status {status}; "
            f"see {process.log}"
        )
    return process.last_mark if status < 0 else "had ended"


def _clear(folder: Path) -> None:
    # here, as a comparison of what is left over needs an empty start
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    folder.mkdir(parents=True)


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("runs/soak"), help="folder of the runs")
    parser.add_argument("--case", choices=CASES, action="append", required=True)
    parser.add_argument("--kills", required=True, help="instants, one per process, with commas")
    parser.add_argument("--keep", action="store_true", help="leave equal runs on disk too")
    parser.add_argument("--forked", action="store_true", help="import the libraries only once")
    options = parser.parse_args()
    starter = Nursery() if options.forked else Fresh()
    harness = Harness(options.work, keep=options.keep, starter=starter)
    every = True
    for name in options.case:
        outcome = harness.disturbed(CASES[name], options.kills.split(","))
        print(json.dumps(asdict(outcome)), flush=True)  # noqa: T201
        every = every and outcome.equal
    return 0 if every else 1


if __name__ == "__main__":
    sys.exit(main())
