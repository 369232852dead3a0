"""From names in a configuration to reward functions, and what their signatures ask for."""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lrlhf.functional.names import import_function
from lrlhf.rewards.function import RESERVED, RewardError, RewardFunction, did_you_mean

NamedFunction = str | RewardFunction | Callable[..., Any]
"""A reward function, or its import path or the short name of a built-in one."""

_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_BY_KEYWORD = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class BoundFunction(NamedTuple):
    """A reward function under the name that its results have everywhere."""

    name: str
    function: Callable[..., Any]


def bind_functions(
    functions: Sequence[NamedFunction] | Mapping[str, NamedFunction],
    names: Sequence[str] | None,
    builtins: Mapping[str, type[RewardFunction]],
) -> list[BoundFunction]:
    """Find every function and give it a name.

    Args:
        functions: In the order of the results; a mapping names them itself.
        names: One per function; None: those of the functions or their classes.
        builtins: Classes that have a short name.

    Raises:
        ValueError: A function cannot be found or called, or two have the same name.
    """
    if isinstance(functions, Mapping):
        if names is not None:
            raise ValueError("names: functions is a mapping, which names them already; drop names")
        names, functions = list(functions), list(functions.values())
    if isinstance(functions, str) or callable(functions):
        raise ValueError("functions must be a list of reward functions, even if it is only one")
    if not functions:
        raise ValueError("functions is empty: name at least one reward function")
    if names is not None and len(names) != len(functions):
        raise ValueError(f"names has {len(names)} entries for {len(functions)} functions")
    found = [_find(function, builtins) for function in functions]
    bound = [
        BoundFunction(name, function)
        for name, function in zip(names or map(default_name, found), found, strict=True)
    ]
    _check_names([name for name, _ in bound])
    for name, function in bound:
        _check_signature(name, function)
    return bound


def default_name(function: Callable[..., Any]) -> str:
    """Return a plain function's own name, or the class name in snake case."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function):
        return function.__name__
    return _BOUNDARY.sub("_", type(function).__name__).lower()


def chosen_arguments(bound: BoundFunction, available: Mapping[str, Any]) -> dict[str, Any]:
    """Pick what the function's signature names.

    Raises:
        RewardError: It needs an argument that is not available, or would get one that it cannot
            be given.
    """
    parameters = inspect.signature(bound.function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        check_column_names(bound, available)
        chosen = dict(available)
    else:
        chosen = {p.name: available[p.name] for p in parameters if p.name in available}
    for parameter in parameters:
        required = parameter.kind in _BY_KEYWORD and parameter.default is inspect.Parameter.empty
        if required and parameter.name not in available:
            columns = sorted(set(available) - set(RESERVED))
            raise RewardError(
                f"reward function {bound.name!r} takes an argument {parameter.name!r}, and the "
                f"data has no such column{did_you_mean(parameter.name, available)} (columns: "
                f"{', '.join(columns) or 'none'}; always there: {', '.join(RESERVED)})"
            )
    return chosen


def check_column_names(bound: BoundFunction, columns: Iterable[str]) -> None:
    """Refuse columns with the name of an argument that Python fills, such as ``self``.

    Raises:
        RewardError: There is one.
    """
    if clash := sorted(_filled_by_python(bound.function).intersection(columns)):
        raise RewardError(
            f"reward function {bound.name!r} cannot be given the column {clash[0]!r}: Python "
            "itself fills the argument of that name; rename the column"
        )


def _filled_by_python(function: Callable[..., Any]) -> frozenset[str]:
    plain: Any = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    if not inspect.isroutine(plain):
        plain = type(plain).__call__
    plain = getattr(plain, "__func__", plain)
    return frozenset(inspect.signature(plain).parameters) - frozenset(
        inspect.signature(function).parameters
    )


def _find(
    function: NamedFunction, builtins: Mapping[str, type[RewardFunction]]
) -> Callable[..., Any]:
    label = str(function)
    if isinstance(function, str):
        known = builtins.get(function)
        function = known or import_function("reward function", function, builtins)
    if isinstance(function, type):
        return _instance(function, label)
    if not callable(function):
        raise ValueError(
            f"reward function {function!r} cannot be called; give a function, an object with "
            "__call__, an import path, or class_path and init_args"
        )
    return function


def _instance(function_class: type, label: str) -> Callable[..., Any]:
    parameters = inspect.signature(function_class).parameters.values()
    needed = [
        p.name for p in parameters if p.kind in _BY_KEYWORD and p.default is inspect.Parameter.empty
    ]
    if needed:
        raise ValueError(
            f"reward function {label!r} needs {', '.join(needed)}: write it as `class_path: "
            f"{function_class.__module__}.{function_class.__qualname__}` with `init_args`"
        )
    instance = function_class()
    if not callable(instance):
        raise ValueError(f"reward function {label!r} is a class without __call__")
    return instance  # type: ignore[no-any-return]


def _check_names(names: Sequence[str]) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(
            f"{Counter(names)[repeated[0]]} reward functions are called {repeated[0]!r}: tell them "
            "apart with names, or write functions as a mapping from name to function"
        )
    for name in names:
        if not name or name != name.strip():
            raise ValueError(f"{name!r} cannot name a reward function")


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise ValueError(
            f"reward function {name!r}: Python cannot tell its arguments ({error}); wrap it in a "
            "function of your own"
        ) from error
    for parameter in parameters:
        required = parameter.default is inspect.Parameter.empty
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY and required:
            raise ValueError(
                f"reward function {name!r} takes {parameter.name!r} by position only, and "
                "everything is passed by keyword: drop the `/` from its signature"
            )
