"""The table of faults is whole, and its Markdown says what was seen."""

import ast
from pathlib import Path

from tests.faults.faults_table import FAULTS, Outcome, markdown


def test_every_fault_has_a_test_and_every_test_is_of_a_fault() -> None:
    names = []
    for path in Path(__file__).parent.glob("test_faults_*.py"):
        for node in ast.parse(path.read_text()).body:
            arguments = [a.arg for a in node.args.args] if isinstance(node, ast.FunctionDef) else []
            if isinstance(node, ast.FunctionDef) and "table" in arguments:
                names.append(node.name)
    tests = [name.removeprefix("test_") for name in names if name.startswith("test_")]
    assert sorted(tests) == sorted(FAULTS)


def test_there_are_forty_faults_with_an_outcome_that_is_expected() -> None:
    assert len(FAULTS) >= 40
    assert {fault.expected for fault in FAULTS.values()} == {"recovered", "stopped"}
    assert len({fault.injected for fault in FAULTS.values()}) == len(FAULTS)


def test_the_table_shows_what_was_seen_and_what_was_not_run() -> None:
    first, second, *_ = FAULTS
    shown = markdown({first: Outcome(first, "stopped", "exit 1: `a | b`")}).splitlines()
    assert shown[2].endswith("| stopped | exit 1: `a \\| b` |")
    assert FAULTS[second].injected in shown[3]
    assert shown[3].endswith("| not run |  |")
    assert shown[-1].endswith(
        f"0 recovered, 1 stopped with a clear message, {len(FAULTS) - 1} not run."
    )
