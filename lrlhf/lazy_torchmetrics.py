"""Loads torchmetrics piece by piece: Lightning takes three names of its more than three hundred.

``import torchmetrics`` loads every metric there is, and what those can use (torchvision, scipy,
scikit-learn, pandas, models of transformers), a third of the time that ``import lightning`` takes.
Nothing outside the standard library may be imported here, see `lrlhf.__main__`.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any, Final

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
