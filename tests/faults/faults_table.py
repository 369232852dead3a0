"""What is done to runs on purpose, and what has to become of them.

``python -m tests.faults.faults_table`` injects every fault and prints the table of
docs/reliability.md; the outcomes are those of that run.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPORT = "LRLHF_FAULTS_REPORT"
"""Environment variable: a file that gets one line of JSON per fault."""


class Fault(NamedTuple):
    """A fault, and what has to become of the run."""

    area: str
    injected: str
    expected: str
    """``recovered`` or ``stopped``."""


class Outcome(NamedTuple):
    """What became of a run."""

    id: str
    ended: str
    seen: str


def _read() -> dict[str, Fault]:
    with Path(__file__).with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {row["id"]: Fault(row["area"], row["injected"], row["expected"]) for row in rows}


FAULTS = _read()


def report(outcome: Outcome) -> None:
    """Add what was seen to the report, where one is wanted."""
    path = os.environ.get(REPORT)
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps(outcome._asdict()) + "\n")


def markdown(outcomes: dict[str, Outcome]) -> str:
    """Write the table; a fault that was not injected says so."""
    lines = ["| # | area | injected | outcome | what was seen |", "|---|---|---|---|---|"]
    for number, (name, fault) in enumerate(FAULTS.items(), start=1):
        ended, seen = ("not run", "") if name not in outcomes else outcomes[name][1:]
        seen = seen.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {number} | {fault.area} | {fault.injected} | {ended} | {seen} |")
    counts = {
        word: sum(o.ended == word for o in outcomes.values()) for word in ("recovered", "stopped")
    }
    total = f"{len(FAULTS)} faults: {counts['recovered']} recovered, {counts['stopped']} stopped"
    return "\n".join(
        [*lines, "", f"{total} with a clear message, {len(FAULTS) - len(outcomes)} not run."]
    )


def main() -> int:
    """Inject every fault and print the table; further arguments go to pytest."""
    tests = [str(path) for path in sorted(Path(__file__).parent.glob("test_faults_*.py"))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.jsonl"
        path.touch()
        command = [sys.executable, "-m", "pytest", "-q", "--no-cov", "--tb=short", *tests]
        ended = subprocess.run(
            [*command, *sys.argv[1:]], env={**os.environ, REPORT: str(path)}, stdout=sys.stderr
        )
        rows = [Outcome(**json.loads(line)) for line in path.read_text().splitlines()]
    sys.stdout.write(markdown({row.id: row for row in rows}) + "\n")
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
