"""Which lines of lrlhf only run on a GPU, and which test runs each of them.

    python tools/gpu_lines.py            # writes the table of docs/gpu.md
    python tools/gpu_lines.py --check    # fails if a line has no test

A function counts if it names CUDA, NCCL, CUDA IPC or a GPU, or asks whether a device is the CPU.
Tests say with ``pytest.mark.gpu_lines("module.function")`` what they are written for, a module or a
class standing for all of it; only those that are skipped without a GPU count. Whether a line is
reached is known once ``make gpu`` has run.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_DEVICES = {"cuda", "nccl", "ipc", "gpu"}
_ATTRIBUTES = {"cuda", "accelerator", "is_cuda", "is_cpu", "_on_gpu"}
_NAMES = {"CUDAAccelerator", "is_cpu"}
PAGE = ROOT / "docs" / "gpu.md"
HEADER = "| function | tests |"
MARK = "pytest.mark.gpu_lines"


class Place(NamedTuple):
    """A function, or what stands around the functions of a module."""

    name: str
    lines: tuple[int, ...]


def places(root: Path = ROOT / "lrlhf") -> Iterator[Place]:
    """Go through the functions of a package that have lines for GPUs."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        yield from _inside(ast.parse(path.read_text()), module)


def _inside(node: ast.AST, name: str) -> Iterator[Place]:
    around: set[int] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _inside(child, f"{name}.{child.name}")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if lines := _lines(child):
                yield Place(f"{name}.{child.name}", tuple(sorted(lines)))
        elif not isinstance(child, ast.Import | ast.ImportFrom | ast.Expr | ast.AnnAssign):
            around |= _lines(child)
    if around:
        yield Place(name, tuple(sorted(around)))


def _lines(tree: ast.AST) -> set[int]:
    return {node.lineno for node in ast.walk(tree) if _is_of_a_gpu(node)}


def _is_of_a_gpu(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr=name):
            return name in _ATTRIBUTES
        case ast.Name(id=name):
            return name in _NAMES
        case ast.Constant(value=str(text)):
            return text in _DEVICES
        case ast.Compare(left=left, comparators=others):
            sides = [left, *others]
            words = [one.value for one in sides if isinstance(one, ast.Constant)]
            return "cpu" in words
    return False


def marked_tests(root: Path = ROOT / "tests" / "gpu") -> dict[str, list[str]]:
    """Return what tests say they run, by its name: the tests."""
    found: dict[str, list[str]] = {}
    for path in sorted(root.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                for name in _marked(node):
                    found.setdefault(name, []).append(f"{path.name}::{node.name}")
    return found


def _marked(function: ast.FunctionDef) -> Iterator[str]:
    for mark in function.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == MARK:
            yield from (str(one.value) for one in mark.args if isinstance(one, ast.Constant))


def cover(name: str, known: dict[str, list[str]]) -> list[str]:
    """Return the tests of a place: of itself, or of a class or module that it lies in."""
    parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return list(dict.fromkeys(test for prefix in prefixes for test in known.get(prefix, ())))


def page() -> str:
    """Return the page of the documentation, its table written anew."""
    known = marked_tests()
    rows = [
        f"| `{place.name.removeprefix('lrlhf.')}` | "
        f"{', '.join(f'`{one}`' for one in cover(place.name, known)) or 'none'} |"
        for place in places()
    ]
    before = PAGE.read_text().partition(HEADER)[0]
    return "\n".join([before + HEADER, "| --- | --- |", *rows, ""])


def problems() -> list[str]:
    """Name what has no test, and what tests name that there is not."""
    known, found = marked_tests(), list(places())
    bare = [f"{place.name} has no test" for place in found if not cover(place.name, known)]
    names = [place.name for place in found]
    lost = [
        f"{tests_of[0]} names {name}, which has no line for GPUs"
        for name, tests_of in known.items()
        if not any(one == name or one.startswith(f"{name}.") for one in names)
    ]
    return bare + lost


if __name__ == "__main__":
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page())
    elif found := problems():
        sys.exit("\n".join(found))
