"""Many kills, drawn by a seed: what ``make soak`` runs.

    python -m tests.faults.campaign --runs 50 --seed 7

It goes on where it was stopped, and at its end writes ``report.txt`` and ``report.json``. Each
run has processes of its own, one after another, and is killed at random instants or named ones.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.cases import CASES, ROOT, Case
from tests.faults.kills import Harness, Outcome
from tests.faults.processes import BrokenRunError

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
_SOAKED = ("RLOO", "PPO", "RewardModel")


class Planned(NamedTuple):
    """One run: its case and its kills."""

    case: str
    kills: list[str]


def plan(runs: int, seed: int, *, vllm: bool = True) -> list[Planned]:
    """Draw the runs: all cases in turn, each with instants of its own."""
    numbers = random.Random(seed)
    plain = cycle(case for case in CASES.values() if not case.vllm)
    engines = cycle(case for case in CASES.values() if case.vllm)
    chosen = [
        next(engines if vllm and run % _VLLM_EVERY == _VLLM_EVERY - 1 else plain)
        for run in range(runs)
    ]
    return [Planned(case.name, draw(case, numbers)) for case in chosen]


def draw(case: Case, numbers: random.Random) -> list[str]:
    """Draw what is done to one run: up to three kills, at random, at named steps, or at files."""
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
    evaluation = ["validating", "validated"] if step % 4 == 0 else []
    return [*phases, *evaluation, "optimizer", "trained"]


def carry_out(planned: Sequence[Planned], work: Path) -> list[Outcome]:
    """Run what is planned and not done yet; each outcome is on disk as soon as it is known."""
    harness = Harness(work)
    work.mkdir(parents=True, exist_ok=True)
    done = work / "outcomes.jsonl"
    outcomes = _read(done, planned)
    for number in range(len(outcomes), len(planned)):
        case, kills = planned[number]
        try:
            outcome = harness.disturbed(CASES[case], kills, name=f"run_{number:03d}")
        except BrokenRunError as broken:
            outcome = Outcome(case, kills, differences=[str(broken)])
        outcomes.append(outcome)
        with done.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        end = "equal" if outcome.equal else "; ".join(outcome.differences)
        print(f"{number + 1}/{len(planned)} {case} {kills} {outcome.reached}: {end}", flush=True)  # noqa: T201
    return outcomes


def _read(done: Path, planned: Sequence[Planned]) -> list[Outcome]:
    lines = done.read_text().splitlines() if done.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    for outcome, (case, kills) in zip(outcomes, planned, strict=False):
        if (outcome.case, outcome.kills) != (case, kills):
            raise SystemExit(f"{done} is of other runs (--runs, --seed): take another --work")
    return outcomes[: len(planned)]


def soak(kinds: Sequence[str], iterations: int) -> list[dict[str, Any]]:
    """Train each kind for long, in a process of its own, and return what grew."""
    grown = []
    for kind in kinds:
        command = ["-m", "tests.faults.soak", "--kind", kind, "--iterations", str(iterations)]
        told = subprocess.run(
            [sys.executable, "-W", "ignore", *command], cwd=ROOT, capture_output=True, text=True
        )
        last = told.stdout.strip().splitlines()[-1:]
        if not last or not last[0].startswith("{"):
            raise SystemExit(f"{' '.join(command)} failed:\n{told.stderr[-3000:]}")
        grown.append(json.loads(last[0]))
        print(last[0], flush=True)  # noqa: T201
    return grown


def report(outcomes: Sequence[Outcome], grown: Sequence[dict[str, Any]], work: Path) -> str:
    """Lay it out as a table, with the command that repeats each failure."""
    rows = [("case", "killed at", "reached", "s", "end")]
    for one in outcomes:
        end = "equal" if one.equal else "; ".join(one.differences[:4])
        rows.append(
            (one.case, " ".join(one.kills), " ".join(one.reached), f"{one.seconds:.0f}", end)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join([*(row[i].ljust(widths[i]) for i in range(4)), row[4]]).rstrip() for row in rows
    ]
    lines += [one.repeat(work) for one in outcomes if not one.equal]
    equal = sum(one.equal for one in outcomes)
    kills = sum(reached != "had ended" for one in outcomes for reached in one.reached)
    lines.append(f"{equal} of {len(outcomes)} runs ended equal, after {kills} kills")
    for one in grown:
        slopes = ", ".join(f"{name} {value:+.3g}" for name, value in one["growth"].items())
        verdict = "; ".join(one["excesses"]) or "nothing piles up"
        lines.append(f"{one['kind']}, {one['iterations']} iterations: {slopes} each: {verdict}")
    return "\n".join(lines)


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("runs/soak"), help="folder of the runs")
    parser.add_argument("--runs", type=int, default=50, help="runs that are killed")
    parser.add_argument("--seed", type=int, default=7, help="of cases and instants")
    parser.add_argument("--no-vllm", action="store_true", help="leave out what starts vLLM")
    parser.add_argument("--iterations", type=int, default=500, help="of the memory soak; 0: none")
    options = parser.parse_args()
    planned = plan(options.runs, options.seed, vllm=not options.no_vllm)
    outcomes = carry_out(planned, options.work)
    grown = soak(_SOAKED if options.iterations else (), options.iterations)
    told = report(outcomes, grown, options.work)
    (options.work / "report.txt").write_text(told + "\n")
    everything = {"runs": [asdict(one) for one in outcomes], "soak": grown}
    (options.work / "report.json").write_text(json.dumps(everything, indent=1) + "\n")
    print(told)  # noqa: T201
    well = all(one.equal for one in outcomes) and not any(one["excesses"] for one in grown)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
