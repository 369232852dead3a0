"""Kills runs at any instant, continues them, and compares their ends with undisturbed ones.

    python -m tests.faults.kills --runs 50 --seed 7
    python -m tests.faults.kills --case ppo --kills time:0.613,optimizer@7

The first is what ``make soak`` runs: kills at instants drawn by a seed. It goes on where it was
stopped, and at its end writes ``report.txt``. The instants are those of `tests.faults.kill_points`,
and ``time:0.613``: from outside, when so much of the way is done that a process has before it when
its training begins.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.faults.cases import CASES, ROOT, Case, Stage
from tests.forked import Popen

_START_LIMIT = 600.0
"""Seconds until a process trains: a vLLM server takes minutes on a busy machine."""
_RUN_LIMIT = 1800.0
"""Seconds of a whole process, after which something hangs."""
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "PYTHONWARNINGS": "ignore",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "LRLHF_DEBUG": "1",
}


class BrokenRunError(RuntimeError):
    """A run did not end as it should, apart from the kills."""


class Course(NamedTuple):
    """The way of a run that nothing disturbs."""

    marks: list[str]
    """Where it comes by, in order."""
    seconds: float
    """From the first mark to the end."""

    def place_of(self, marks: Sequence[str]) -> int:
        """Tell where on this way a run begins; ``marks`` are its first ones."""
        step = marks[0].rpartition("@")[2] if marks else "0"
        return self.marks.index(f"trained@{step}") if step != "0" else 0


class Process:
    """One ``lrlhf fit`` in a session of its own, its marks and its log.

    Args:
        folder: Has ``config.yaml``; the run is written below it.
        resumes: Continue from the last checkpoint.
        kill: See `tests.faults.kill_points`.
        program: What is run instead.
    """

    def __init__(
        self, folder: Path, *, resumes: bool, kill: str = "", program: Sequence[str] = ()
    ) -> None:
        number = len(list(folder.glob("*.log")))
        self.log = folder / f"{number}.log"
        self._marks = folder / f"{number}.marks"
        command = [sys.executable, "-m", "lrlhf", "fit", "--config", "config.yaml"]
        command += ["--ckpt_path", "last"] if resumes else []
        own = {"LRLHF_MARKS": str(self._marks), "LRLHF_KILL": kill}
        with self.log.open("wb") as output:
            self._process = Popen(
                program or command,
                cwd=folder,
                env=os.environ | ENVIRONMENT | own,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def marks(self) -> list[str]:
        """What the run has come by, in order."""
        return self._marks.read_text().split() if self._marks.exists() else []

    def _ended_within(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    def wait_for_marks(self, count: int = 1, *, seconds: float = _START_LIMIT) -> bool:
        """Wait until the run has come by so many marks; False: it has ended before."""
        limit = time.monotonic() + seconds
        while len(self.marks) < count:
            if self._ended_within(0.01):
                return False
            if time.monotonic() > limit:
                self._end()
                raise BrokenRunError(f"not at mark {count} after {seconds:.0f} s; see {self.log}")
        return True

    def kill_within(self, share: float, whole: Course) -> None:
        """Kill the run, its workers and its engine, unless it ends before.

        Args:
            share: Of the way that it has before it when it begins, from 0 to 1.
            whole: Of the run that nothing disturbs.
        """
        ahead = whole.marks[whole.place_of(self.marks) :]
        marks, rest = divmod(share * len(ahead), 1.0)
        # not at the mark, but anywhere between it and the next one
        between = rest * whole.seconds / len(whole.marks)
        came = self.wait_for_marks(int(marks) + 1, seconds=_RUN_LIMIT)
        if came and not self._ended_within(between):
            self._end()

    def _end(self) -> None:
        others = psutil.Process(self._process.pid).children(recursive=True)
        os.killpg(self._process.pid, signal.SIGKILL)
        for other in others:
            # an engine has a group of its own
            with contextlib.suppress(psutil.NoSuchProcess):
                other.kill()

    def wait(self) -> int:
        """Wait for the end of the run and of all that it started, and return its status."""
        if not self._ended_within(_RUN_LIMIT):
            self._end()
            raise BrokenRunError(f"not ended after {_RUN_LIMIT:.0f} s; see {self.log}")
        limit = time.monotonic() + 60
        while left := list(self._left()):
            if time.monotonic() > limit:
                raise BrokenRunError(f"processes {left} outlive the run in {self.log.parent}")
            time.sleep(0.1)
        return int(self._process.returncode)

    def wait_for_kill(self, kill: str, course: Course) -> str:
        """Let the run go on until its kill, and return the last mark before it."""
        by_time = kill.startswith("time:")
        if by_time:
            self.wait_for_marks()
            self.kill_within(float(kill.removeprefix("time:")), course)
        status = self.wait()
        if status >= 0 and not (by_time and status == 0):
            raise BrokenRunError(
                f"the run was to be killed at {kill}, and ended by itself with status {status}; "
                f"see {self.log}"
            )
        return (self.marks or ["start-up"])[-1] if status < 0 else "had ended"

    def wait_for_end(self) -> None:
        """Wait for an end without errors, of which nothing is left."""
        if (status := self.wait()) != 0:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise BrokenRunError(f"status {status}; the end of {self.log}:\n{tail}")

    def _left(self) -> Iterator[int]:
        # children that are forked show the environment of the process that forked them, but the
        # group that they were put in is the run's
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.AccessDenied, psutil.NoSuchProcess, ProcessLookupError):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                in_group = os.getsid(process.pid) == self._process.pid
                if in_group or process.environ().get("LRLHF_MARKS") == str(self._marks):
                    yield process.pid


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


class Harness:
    """Runs cases below one folder.

    Args:
        work: Has the models, the undisturbed runs and, while they last, the killed ones.
    """

    def __init__(self, work: Path) -> None:
        self.work = work.resolve()
        self._stage = Stage(self.work / "stage")

    def undisturbed(self, case: Case) -> tuple[Path, Course]:
        """Run a case to its end, once; returns its folder and its course."""
        folder = self.work / case.name / "whole"
        told = folder / "course.json"
        if not told.exists():
            self._stage.build()
            self._prepare(case, folder)
            process = Process(folder, resumes=False)
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
        self._prepare(case, folder)
        start = time.monotonic()
        for number, kill in enumerate(kills):
            by_time = kill.startswith("time:")
            process = Process(folder, resumes=number > 0, kill="" if by_time else kill)
            outcome.reached.append(process.wait_for_kill(kill, course))
        Process(folder, resumes=True).wait_for_end()
        # torch is not needed before there is something to compare
        from tests.faults.compare import differences  # noqa: PLC0415

        outcome.differences = differences(whole, folder / "run")
        outcome.seconds = time.monotonic() - start
        return outcome

    def _prepare(self, case: Case, folder: Path) -> None:
        # a comparison of what is left over needs an empty start
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._stage.write_config(case, folder / "config.yaml")


# ---------------------------------------------------------------------- the campaign


_FILES = {
    "open:.*.ckpt.tmp": 4,
    "torn:.*.ckpt.tmp": 4,
    "rename:*.ckpt": 4,
    "renamed:*.ckpt": 4,
    "torn:metrics.csv": 5,
    "torn:.*.eval_scores_*.tmp": 2,
    "rename:eval_scores_*.jsonl": 2,
    "renamed:eval_scores_*.jsonl": 2,
    "torn:config.json": 1,
    "rename:final": 1,
    "renamed:final": 1,
}
"""Instants about files, and how often each comes in a run at least."""
_VLLM_EVERY = 4
"""Every so many runs one with vLLM, which takes several times as long."""


def plan(runs: int, seed: int, *, vllm: bool = True) -> list[tuple[str, list[str]]]:
    """Draw cases and kills: all cases in turn, each with instants of its own."""
    numbers = random.Random(seed)
    plain = cycle(case for case in CASES.values() if not case.vllm)
    engines = cycle(case for case in CASES.values() if case.vllm)
    chosen = [
        next(engines if vllm and run % _VLLM_EVERY == _VLLM_EVERY - 1 else plain)
        for run in range(runs)
    ]
    return [(case.name, draw(case, numbers)) for case in chosen]


def draw(case: Case, numbers: random.Random) -> list[str]:
    """Draw what is done to one run: up to two kills, at random, at named steps, or at files."""
    kind = numbers.choice(("time", "time", "step", "file"))
    if kind == "time":
        return [f"time:{numbers.uniform(0.01, 0.9):.3f}" for _ in range(numbers.choice((1, 1, 2)))]
    if kind == "file":
        files = _FILES | ({"torn:rollouts.jsonl": 8} if case.draws else {})
        pattern = numbers.choice(sorted(files))
        return [f"{pattern}@{numbers.randint(1, files[pattern])}"]
    # in order: a resumed run does not come back to what lies before its checkpoint
    steps = sorted(numbers.sample(range(1, case.steps), numbers.choice((1, 2))))
    return [f"{numbers.choice(_points(case, step))}@{step}" for step in steps]


def _points(case: Case, step: int) -> list[str]:
    phases = ["generate", "reward", "logprob", "update"] if case.draws else []
    phases += ["sync"] if case.vllm else []
    phases += ["turn1", "turn2", "turn3"] if case.plays else []
    evaluation = ["validating", "validated"] if step % 4 == 0 else []
    return [*phases, *evaluation, "optimizer", "trained"]


def carry_out(planned: Sequence[tuple[str, list[str]]], work: Path) -> list[Outcome]:
    """Run what is planned and not done yet; each outcome is on disk as soon as it is known."""
    harness = Harness(work)
    work.mkdir(parents=True, exist_ok=True)
    done = work / "outcomes.jsonl"
    lines = done.read_text().splitlines() if done.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    if [(one.case, one.kills) for one in outcomes] != list(planned[: len(outcomes)]):
        raise SystemExit(f"{done} is of other runs (--runs, --seed): take another --work")
    for number in range(len(outcomes), len(planned)):
        case, kills = planned[number]
        try:
            outcome = harness.disturbed(CASES[case], kills, name=f"run_{number:03d}")
        except BrokenRunError as broken:
            outcome = Outcome(case, kills, differences=[str(broken)])
        outcomes.append(outcome)
        with done.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        _say(f"{number + 1}/{len(planned)} {_told(outcome)}")
    return outcomes


def soak(case: str, iterations: int) -> dict[str, Any]:
    """Train for long in a process of its own, and return what grew."""
    command = ["-m", "tests.faults.soak", "--case", case, "--iterations", str(iterations)]
    told = subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=ROOT, capture_output=True, text=True
    )
    last = told.stdout.strip().splitlines()[-1:]
    if not last or not last[0].startswith("{"):
        raise SystemExit(f"{' '.join(command)} failed:\n{told.stderr[-3000:]}")
    _say(last[0])
    grown: dict[str, Any] = json.loads(last[0])
    return grown


def _told(one: Outcome) -> str:
    """Say what became of a run, with the options that repeat it."""
    end = "; ".join(one.differences[:4]) or "equal"
    way = f"{', '.join(one.reached)}, {one.seconds:.0f} s"
    return f"--case {one.case} --kills '{','.join(one.kills)}' ({way}): {end}"


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("runs/soak"), help="folder of the runs")
    parser.add_argument("--case", choices=CASES, help="one run of it, with --kills")
    parser.add_argument("--kills", default="", help="instants, one per process, with commas")
    parser.add_argument("--runs", type=int, default=50, help="runs that are killed")
    parser.add_argument("--seed", type=int, default=7, help="of cases and instants")
    parser.add_argument("--no-vllm", action="store_true", help="leave out what starts vLLM")
    parser.add_argument("--iterations", type=int, default=500, help="of the memory soak; 0: none")
    options = parser.parse_args()
    if options.case:
        outcome = Harness(options.work).disturbed(CASES[options.case], options.kills.split(","))
        _say(_told(outcome))
        return bool(outcome.differences)
    planned = plan(options.runs, options.seed, vllm=not options.no_vllm)
    outcomes = carry_out(planned, options.work)
    cases = ("rloo", "ppo", "reward_model") if options.iterations else ()
    grown = [soak(case, options.iterations) for case in cases]
    equal = sum(not one.differences for one in outcomes)
    kills = sum(reached != "had ended" for one in outcomes for reached in one.reached)
    total = f"{equal} of {len(outcomes)} runs ended equal, after {kills} kills"
    lines = [*map(_told, outcomes), total, *map(json.dumps, grown)]
    (options.work / "report.txt").write_text("\n".join(lines) + "\n")
    _say(total)
    return equal < len(outcomes) or any(one["excesses"] for one in grown)


if __name__ == "__main__":
    sys.exit(main())
