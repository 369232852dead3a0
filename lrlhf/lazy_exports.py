"""Names of a package that are imported when they are first used (PEP 562).

A package lists its names once, for people, type checkers and Python alike::

    if TYPE_CHECKING:
        from lrlhf.modules.dpo import DPO
    else:
        __getattr__ = lazy_exports(__name__)

    __all__ = ["DPO"]

So a module imports what it uses, however many neighbours its packages have.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_exports(package: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package, which imports what its ``TYPE_CHECKING`` block does.

    Args:
        package: Name of the package, which is being imported.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807  the name that PEP 562 gives it
        source = _sources(package).get(name)
        if source is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(source), name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__


@cache
def _sources(package: str) -> dict[str, str]:
    """Return the module of each name; read with the first of them, not at start-up."""
    tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
    return {
        alias.name: statement.module
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module is not None
        for alias in statement.names
    }
