"""Python on pages: every block is Python, and what it imports and passes to lrlhf exists."""

import ast
import inspect
import re
import textwrap
from importlib import import_module
from pathlib import Path

import pytest

from tests.docs.names import options_of, public_classes
from tests.docs.public import ROOT
from tests.docs.test_pages import PAGES

BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    """The blocks of Python on a page."""
    return [textwrap.dedent(found[2]) for found in BLOCK.finditer(page.read_text("utf-8"))]


def wrong_in_block(block: str) -> list[str]:
    """What a block names of lrlhf that does not exist; raises SyntaxError where it is no Python."""
    wrong = []
    for node in ast.walk(ast.parse(block)):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("lrlhf"):
                home = import_module(module)
                wrong += [f"{module}.{n.name}" for n in names if not hasattr(home, n.name)]
            case ast.Call(func=ast.Name(id=name), keywords=keywords) if name in public_classes():
                called = public_classes()[name]
                known = {*inspect.signature(called).parameters}
                # with those that a constructor passes on
                known |= options_of(called).keys() if isinstance(called, type) else set()
                wrong += [f"{name}({k.arg})" for k in keywords if k.arg and k.arg not in known]
    return wrong


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_blocks_of_a_page_name_what_exists(page: Path) -> None:
    assert [wrong for block in blocks(page) for wrong in wrong_in_block(block)] == []


def test_what_does_not_exist_is_found() -> None:
    assert wrong_in_block("from lrlhf.modules import RLO, RLOO") == ["lrlhf.modules.RLO"]
    assert wrong_in_block("RLOO('m', [], sample={})") == ["RLOO(sample)"]
