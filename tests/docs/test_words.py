"""The code speaks the field's English: words that were coined here stay away."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lrlhf

ROOT = Path(lrlhf.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
COINED = {
    "asked": "prompt, requested, signals",
    "beside": "further, extra",
    "brief": "summary",
    "filler": "padding rows",
    "gives": "has, returns",
    "hears": "accepts audio",
    "knows": "has",
    "leading": "rank 0 runs",
    "led": "run on rank 0",
    "meant": "expected",
    "play": "episode state",
    "puts": "renames, writes",
    "retake": "replay",
    "retaken": "replayed",
    "said": "text, content, completion",
    "says": "reports",
    "settle": "finish, reshard",
    "settled": "done, resharded",
    "stand": "begin, separate",
    "teaches": "informative",
    "teaching": "teacher, distillation",
    "tells": "reports",
    "theirs": "what it is of: teacher",
    "told": "note, line, record",
    "tour": "depth-first order",
    "unjudged": "unscorable",
    "wants": "requires",
}
"""Parts of identifiers, and the field's words for them (glossary of the contributors' guide)."""
OPENINGS = {
    "asks",
    "asked",
    "gives",
    "hears",
    "knows",
    "tells",
    "told",
    "wants",
}
"""Verbs of people; no docstring begins with one."""


def defined(tree: ast.AST) -> Iterator[str]:
    """Names of functions, classes, parameters, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words(name: str) -> list[str]:
    """``_wantsTour`` and ``wants_tour`` are two words."""
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().split("_")


def test_names_are_cut_into_words() -> None:
    assert words("_uses_DepthFirst") == ["", "uses", "depth", "first"]
    tree = ast.parse("def retake(tour): self.led = play = 1")
    assert {*defined(tree)} == {"retake", "tour", "led", "play"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_name_and_no_docstring_has_a_coined_word(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {name: COINED[word] for name in defined(tree) for word in words(name) if word in COINED}
    assert not found, f"use the field's word: {found}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            continue
        first = (ast.get_docstring(node) or "").partition(" ")[0].lower().strip(".,:")
        assert first not in OPENINGS, f"{getattr(node, 'name', path.name)} begins with {first!r}"
