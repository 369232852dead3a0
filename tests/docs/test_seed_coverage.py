"""Every file and every test that the page on the seeds names exists."""

import ast
import re
from functools import cache

import pytest

from tests.docs.public import ROOT
from tests.docs.test_pages import DOCS, prose

PAGE = DOCS / "seed_coverage.md"
STATES = {"done", "otherwise", "left out"}
COLUMNS = ("feature", "state", "file", "test, or why not")
NAMED = re.compile(r"`((?:lrlhf|tests|examples)/[^`]+)`")


def table_rows(text: str) -> list[list[str]]:
    """The cells of every row: feature, state, file, test or reason."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "feature" and not set(row[0]) <= set("-")]


@cache
def names_of_tests(path: str) -> set[str]:
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def lacking(span: str) -> str | None:
    """Say what a named file or test lacks; None: it is there."""
    path, _, test = span.partition("::")
    if not (ROOT / path).exists():
        return path
    return span if test and test not in names_of_tests(path) else None


def keeps_promise(row: list[str]) -> bool:
    """Whether a row has a state that is known, and what belongs to it."""
    if len(row) != len(COLUMNS) or row[1] not in STATES:
        return False
    _, state, file, evidence = row
    if state == "left out":
        return len(evidence.split()) > 3
    tested = "::test_" in evidence or evidence.startswith("as for ")
    return tested and NAMED.search(file) is not None


ROWS = table_rows(prose(PAGE))


def test_every_file_and_test_exists() -> None:
    spans = [span for row in ROWS for cell in row for span in NAMED.findall(cell)]
    assert len(spans) > 100
    assert [found for span in spans if (found := lacking(span))] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_row_says_what_its_state_promises(row: list[str]) -> None:
    assert keeps_promise(row)


@pytest.mark.parametrize(
    "row",
    [
        ["x", "TODO", "`lrlhf/types.py`", "`tests/docs/test_pages.py::test_x`"],
        ["x", "done", "", "`tests/docs/test_pages.py::test_x`"],
        ["x", "done", "`lrlhf/types.py`", "one day"],
        ["x", "left out", "", "no"],
        ["x", "done", "`lrlhf/types.py`"],
    ],
)
def test_a_row_that_promises_nothing_is_found(row: list[str]) -> None:
    assert not keeps_promise(row)


@pytest.mark.parametrize("span", ["lrlhf/nothing.py", "tests/docs/test_pages.py::test_nothing"])
def test_what_does_not_exist_is_found(span: str) -> None:
    assert lacking(span) == span
