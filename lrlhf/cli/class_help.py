"""``lrlhf help CLASS``: what a class of this library is for, and its options and defaults."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

from lrlhf.options.conversion import parameters_of
from lrlhf.options.errors import ConfigError, hint
from lrlhf.options.parser import constructor_options

_CLASS = re.compile(r"^class ([A-Z]\w*)", re.MULTILINE)


def help_of_class(arguments: Sequence[str]) -> None:
    """Print the docstring of a class, and a line for each option.

    Args:
        arguments: The name of the class, alone or as ``lrlhf.rewards.LearnedReward``.

    Raises:
        ConfigError: There is no such class, or there are several, or it needs another package.
    """
    if len(arguments) != 1:
        raise ConfigError("lrlhf help takes one name of a command or a class")
    modules = _modules_of_classes()
    package, _, name = arguments[0].rpartition(".")
    inside = [
        module
        for module in modules.get(name, [])
        if not package or f"{module}.".startswith(f"{package}.")
    ]
    if not inside:
        raise ConfigError(f"no class {arguments[0]!r} in lrlhf{hint(name, modules)}")
    try:
        kinds = {_path(module, name): getattr(import_module(module), name) for module in inside}
    except ImportError as error:
        raise ConfigError(f"{name} cannot be loaded: {error}") from error
    # first what packages export, of that what the outermost does
    ranks = {path: (path.rpartition(".")[0] in inside, path.count(".")) for path in kinds}
    path, *others = [path for path, rank in ranks.items() if rank == min(ranks.values())]
    if others:
        raise ConfigError(f"several classes have this name: {', '.join([path, *others])}")
    kind = kinds[path]
    lines = [path, "", inspect.getdoc(kind) or "", "", "Options and their defaults:"]
    sys.stdout.write("\n".join([*lines, *(_options(kind) or ["    none"])]) + "\n")


def _modules_of_classes() -> dict[str, list[str]]:
    """Return where each class is defined, read from the source: no module is imported for it."""
    root = Path(__file__).parents[1]
    modules: dict[str, list[str]] = {}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root.parent).with_suffix("").parts
        if parts[1] != "examples":
            for name in _CLASS.findall(file.read_text(encoding="utf-8")):
                modules.setdefault(name, []).append(".".join(parts).removesuffix(".__init__"))
    return modules


def _path(module: str, name: str) -> str:
    """Return where a class is imported from: the outermost package that exports it."""
    kind = getattr(import_module(module), name)
    for package in accumulate(module.split("."), "{}.{}".format):
        known = import_module(package)
        if name in getattr(known, "__all__", ()) and getattr(known, name) is kind:
            return f"{package}.{name}"
    return f"{module}.{name}"


def _options(kind: type) -> list[str]:
    # an exception without a constructor of its own has no signature
    if issubclass(kind, Exception) and "__init__" not in vars(kind):
        return []
    # what is written in the source is a text already
    own = inspect.signature(kind).parameters
    lines = [_line(name, one.annotation, one.default) for name, one in own.items()]
    if not _passes_on(kind):
        return lines
    known, _ = parameters_of(kind)
    passed = (name for name in constructor_options(kind) if name not in own)
    return lines[:-1] + [_line(name, *known[name]) for name in passed]


def _passes_on(kind: type) -> bool:
    """Whether other options reach a base of this library; loading another one may print."""
    constructors = [base for base in kind.__mro__ if inspect.isfunction(vars(base).get("__init__"))]
    for base in constructors:
        if not base.__module__.startswith("lrlhf."):
            return False
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            return base is not constructors[0]
    return False


def _line(name: str, kind: Any, default: Any) -> str:
    shown = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    value = "  (required)" if default is inspect.Parameter.empty else f" = {default!r}"
    return f"    {name}: {shown}{value}"
