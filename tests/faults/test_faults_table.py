"""The table of faults is whole, and its Markdown says what was seen."""

from importlib import import_module
from inspect import signature
from pathlib import Path

from tests.faults.faults_table import FAULTS, Outcome, markdown


def test_every_fault_has_a_test_and_every_test_is_of_a_fault() -> None:
    names: list[str] = []
    for path in Path(__file__).parent.glob("test_faults_*.py"):
        tests = vars(import_module(f"tests.faults.{path.stem}"))
        for name, test in tests.items():
            if not name.startswith("test_") or "table" not in signature(test).parameters:
                continue
            cases = [m for m in getattr(test, "pytestmark", ()) if m.name == "parametrize"]
            of_cases = [case.id for mark in cases for case in mark.args[1]]
            names += of_cases or [name.removeprefix("test_")]
    assert sorted(names) == sorted(FAULTS)


def test_the_table_shows_what_was_seen_and_what_was_not_run() -> None:
    first, second, *_ = FAULTS
    shown = markdown({first: Outcome(first, "stopped", "exit 1: `a | b`")}).splitlines()
    assert shown[2].endswith("| stopped | exit 1: `a \\| b` |")
    assert FAULTS[second].injected in shown[3]
    assert shown[3].endswith("| not run |  |")
    assert shown[-1].endswith(
        f"0 recovered, 1 stopped with a clear message, {len(FAULTS) - 1} not run."
    )
