"""Every file and every test that the page on the seeds names exists."""

import ast
import re
from functools import cache

import pytest

from tests.docs.public import ROOT
from tests.docs.test_pages import DOCS, prose

PAGE = DOCS / "seed_coverage.md"
STATES = {"done", "otherwise", "left out", "TODO"}
NAMED = re.compile(r"`((?:lrlhf|tests)/[^`]+)`")


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


ROWS = table_rows(prose(PAGE))


def test_every_file_and_test_exists() -> None:
    spans = [span for row in ROWS for cell in row for span in NAMED.findall(cell)]
    assert len(spans) > 100
    assert [found for span in spans if (found := lacking(span))] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_row_says_what_its_state_promises(row: list[str]) -> None:
    assert len(row) == 4
    _, state, file, evidence = row
    assert state in STATES
    if state in ("done", "otherwise"):
        assert NAMED.search(file)
        assert "::test_" in evidence or evidence.startswith("as for ")
    if state == "left out":
        assert len(evidence.split()) > 3


@pytest.mark.parametrize("span", ["lrlhf/nothing.py", "tests/docs/test_pages.py::test_nothing"])
def test_what_does_not_exist_is_found(span: str) -> None:
    assert lacking(span) == span
