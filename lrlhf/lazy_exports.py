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
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final


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


_PACKAGE: Final = "torchmetrics"
_HOME: Final[Mapping[str, str]] = {
    "Metric": "metric",
    "MetricCollection": "collections",
    "MeanMetric": "aggregation",
    "__version__": "__about__",
}
"""What Lightning and lrlhf take from the package itself, by the module that defines it."""
_loading: Final = threading.RLock()


class _PiecemealPackage(ModuleType):
    """The package before its ``__init__.py`` was run; any name but the few above runs it."""

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":
            # a module of the package is wanted: they import each other, and this one must be first
            assert self.__spec__ is not None
            self.__dict__[name] = self.__spec__.submodule_search_locations
            import_module(f"{_PACKAGE}.utilities")
            return self.__dict__[name]
        if name == "_logger":  # modules of the package ask for it while they are loaded
            return logging.getLogger(_PACKAGE)
        if name in _HOME:
            value = getattr(import_module(f"{_PACKAGE}.{_HOME[name]}"), name)
            self.__dict__.setdefault(name, value)
            return value
        _run(self)
        return getattr(self, name)

    def __dir__(self) -> list[str]:
        _run(self)
        return dir(self)


def _run(package: ModuleType) -> None:
    """Run the package's ``__init__.py``, once."""
    with _loading:
        kind: type[ModuleType] = type(package)
        if kind is not _PiecemealPackage:
            return
        spec = package.__spec__
        assert spec is not None
        assert spec.loader is not None
        vars(package)["__path__"] = spec.submodule_search_locations
        package.__class__ = ModuleType
        try:
            spec.loader.exec_module(package)
        except BaseException:
            package.__class__ = _PiecemealPackage  # the next one who asks meets the error too
            raise


def load_torchmetrics_piecemeal() -> None:
    """Have ``import torchmetrics`` load what is asked for, unless it is loaded or not installed."""
    if _PACKAGE in sys.modules or (spec := find_spec(_PACKAGE)) is None:
        return
    package = module_from_spec(spec)
    package.__class__ = _PiecemealPackage
    del package.__path__
    sys.modules[_PACKAGE] = package
