"""``lrlhf help CLASS``: what a class of this library is for, and its options and defaults."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from importlib import import_module

from lrlhf.options.errors import ConfigError, hint

_PACKAGES = (
    *("modules", "datamodules", "rewards", "rollout", "callbacks", "loggers", "environments"),
    *("models", "guard", "strategies", "apps.cluster"),
)
"""Those whose classes a config names, and those of the values of their options."""


def help_of_class(arguments: Sequence[str]) -> None:
    """Print the docstring of a class, and a line for each option.

    Args:
        arguments: The name of the class, alone or as ``lrlhf.rewards.LearnedReward``.

    Raises:
        ConfigError: There is no such class, or there is more than one name.
    """
    if len(arguments) != 1:
        raise ConfigError("lrlhf help takes one name of a command or a class")
    kinds = _public_classes()
    name = arguments[0]
    kind = kinds.get(name.rpartition(".")[2])
    if kind is None or name not in {kind.__name__, _path(kind)}:
        raise ConfigError(f"no class {name!r} in lrlhf{hint(name.rpartition('.')[2], kinds)}")
    options = [_option(parameter) for parameter in inspect.signature(kind).parameters.values()]
    lines = [_path(kind), "", inspect.getdoc(kind) or "", "", "Options and their defaults:"]
    sys.stdout.write("\n".join([*lines, *(options or ["    none"])]) + "\n")


def _public_classes() -> dict[str, type]:
    classes: dict[str, type] = {}
    for package in _PACKAGES:
        module = import_module(f"lrlhf.{package}")
        public = {name: getattr(module, name, None) for name in module.__all__}
        classes = {n: one for n, one in public.items() if isinstance(one, type)} | classes
    return classes


def _path(kind: type) -> str:
    """Return where it is imported from: the package rather than the file in it."""
    parts = kind.__module__.split(".")
    return ".".join([*parts[: 3 if parts[1] == "apps" else 2], kind.__name__])


def _option(one: inspect.Parameter) -> str:
    # what is written in the source is a text already
    annotation = one.annotation
    kind = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    default = "  (required)" if one.default is one.empty else f" = {one.default!r}"
    return f"    {one.name}: {kind}{default}"
