"""Names of interchangeable functions, and the import paths that may stand in their place."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

from lrlhf.options.errors import nearest_module


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """Build the error for a name that does not exist, with the nearest one that does.

    Args:
        kind: What is being named, for the message.
        name: What was asked for.
        known: What exists.
    """
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return ValueError(f"unknown {kind} {name!r}, expected one of {', '.join(names)}{hint}")


def import_value(kind: str, name: str, known: Iterable[str]) -> Any:
    """Import what a configuration names by its dotted path.

    Args:
        kind: What is being named, for the message.
        name: Path such as ``my_package.losses.my_loss``.
        known: Names that would not have needed an import, for the message.

    Raises:
        ValueError: No path, or one that leads to nothing.
    """
    if "." not in name:
        raise unknown_name(kind, name, known)
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{kind} {name!r} cannot be imported: {error}{_near(error)}") from error


def _near(error: Exception) -> str:
    """Return ``; did you mean 'x'?`` for a module, or a name of one, that is not there."""
    near = ""
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        near = nearest_module(error.name)
    elif isinstance(error, AttributeError) and error.name:
        close = difflib.get_close_matches(error.name, dir(error.obj), n=1)
        near = next(iter(close), "")
    return f"; did you mean {near!r}?" if near else ""


def import_function(kind: str, name: str, known: Iterable[str]) -> Callable[..., Any]:
    """Import a function that a configuration names by its dotted path; see `import_value`.

    Raises:
        ValueError: No path, or one that leads to nothing that can be called.
    """
    value = import_value(kind, name, known)
    if not callable(value):
        raise ValueError(f"{kind} {name!r} is a {type(value).__name__}, not a function")
    function: Callable[..., Any] = value
    return function
