"""Finds options set to null although their type does not allow it.

jsonargparse takes null for "not given", whatever the type, so the class would fail later and far
from the config.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Collection
from pydoc import locate as import_by_path
from typing import Any

from jsonargparse import Namespace

from lrlhf.cli.messages.errors import ValidationError


def refuse_nulls(value: Any, path: tuple[str, ...] = (), *, strict: Collection[str] = ()) -> None:
    """Check that no option is null that must not be.

    Args:
        value: A parsed config, or a part of one.
        path: Keys that lead to it.
        strict: Options of ``value`` itself that must not be null.

    Raises:
        ValidationError: One is; names it.
    """
    if isinstance(value, list):
        for item in value:
            refuse_nulls(item, path)
    if not isinstance(value, Namespace):
        return
    children = vars(value)
    class_path, options = children.get("class_path"), children.get("init_args")
    if isinstance(class_path, str) and isinstance(options, Namespace):
        strict = options_without_null(import_by_path(class_path))
        children = vars(options)
    for name, given in children.items():
        if given is None and name in strict:
            key = ".".join((*path, name))
            raise ValidationError(
                f'Parser key "{key}": null is not accepted here; leave the line out to get the '
                "default"
            )
        refuse_nulls(given, (*path, name))


def options_without_null(cls: object) -> set[str]:
    """Options of a class that have a type and a default of which neither is None."""
    if not isinstance(cls, type):
        return set()
    strict: dict[str, bool] = {}
    for constructor in (vars(base).get("__init__") for base in cls.__mro__):
        if not inspect.isfunction(constructor):
            continue
        try:
            hints = typing.get_type_hints(constructor)
        except NameError:  # a type that is imported for type checkers only
            break
        parameters = inspect.signature(constructor).parameters.values()
        for parameter in parameters:
            given = parameter.default not in (None, inspect.Parameter.empty)
            never_null = given and not _allows_none(hints.get(parameter.name, Any))
            strict.setdefault(parameter.name, never_null)
        if all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters):
            break  # else the next class takes the rest
    return {name for name, never_null in strict.items() if never_null}


def _allows_none(hint: Any) -> bool:
    if typing.get_origin(hint) in {typing.Union, types.UnionType}:
        return any(_allows_none(branch) for branch in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return None in typing.get_args(hint)
    return hint in {Any, object, type(None)}
