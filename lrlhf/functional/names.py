"""Functions that users name in a config: by a short name, or by an import path."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from typing import Any


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """Say that there is no such ``kind``, what there is, and which was probably meant."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return ValueError(f"unknown {kind} {name!r}{hint} (known: {', '.join(names)})")


def import_function(kind: str, path: str, known: Iterable[str]) -> Callable[..., Any]:
    """Import a function by its dotted path.

    Raises:
        ValueError: The path has no dot and so is an unknown short name, or leads nowhere.
    """
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise unknown_name(kind, path, known)
    try:
        function = vars(importlib.import_module(module_name))[attribute]
    except (ImportError, KeyError) as error:
        raise ValueError(f"{kind} {path!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"{kind} {path!r} is not a function")
    return function  # type: ignore[no-any-return]
