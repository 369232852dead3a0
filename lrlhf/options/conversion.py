"""Arguments of constructors from Python, read as a config is.

A value of the parameter's type is taken as it is. What else a config could say, such as a dict or
the name of a class, goes through the parser of the command line, so a mistake gets its sentence.
"""

from __future__ import annotations

import inspect
import os
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import is_dataclass
from functools import cache, wraps
from numbers import Integral, Real
from typing import Any, TypeVar

from lrlhf.options.errors import hint

ClassT = TypeVar("ClassT", bound=type)
PLAIN = None | bool | int | float | str
"""What a config holds but for lists and mappings."""
_KINDS: Mapping[Any, Any] = {
    None: type(None),
    str: str | os.PathLike,
    int: Integral,
    float: Real,
}
"""Values of a type; a bool is neither an integer nor a number here."""
_UNIONS = (typing.Union, types.UnionType)


class QuotedText(str):
    """Text of a config that YAML would read as something else, had it not been in quotes.

    jsonargparse reads whatever is a ``str``, and no subclass, as YAML once more for each option
    without a type.
    """

    __slots__ = ()


def plain(value: Any) -> Any:
    """Return a value with plain text in the place of `QuotedText`."""
    if isinstance(value, QuotedText):
        return str(value)
    if type(value) is dict:
        return {plain(key): plain(part) for key, part in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(plain, value))
    return value


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def settings(cls: ClassT) -> ClassT:
    """Have the constructor of a dataclass take what a config has, see `converting`."""
    made: Any = cls
    made.__init__ = converting(made.__init__, made)
    return cls


def converting(init: Callable[..., None], owner: type) -> Callable[..., None]:
    """Wrap the constructor of a class: a dict becomes the object that its parameter wants.

    Raises:
        TypeError: From the constructor: there is no such option, or a value is of another type.
    """
    positions = [name for name in inspect.signature(init).parameters if name != "self"]

    @wraps(init)
    def constructor(self: Any, *args: Any, **options: Any) -> None:
        given = {**dict(zip(positions, args, strict=False)), **options}
        changed = convert(owner, given, type(self))
        if changed is not given:
            args = tuple(changed[name] for name, _ in zip(positions, args, strict=False))
            options = {name: changed[name] for name in options}
        init(self, *args, **options)

    return constructor


def convert(owner: type, given: dict[str, Any], kind: type) -> dict[str, Any]:
    """Return the arguments of a constructor with objects in the place of their descriptions.

    Args:
        owner: The class that has the constructor.
        given: Arguments by name; returned as they are if none needs a change.
        kind: The class of the object, which may be a subclass.

    Raises:
        TypeError: There is no such option, or a value is of another type.
    """
    known, is_open = parameters_of(owner)
    unknown = [] if is_open else [name for name in given if name not in known]
    if unknown:
        raise TypeError(_unknown(kind.__name__, unknown[0], {*known, *parameters_of(kind)[0]}))
    changed = {
        key: _parsed(kind.__name__, key, known[key][0], value)
        for key, value in given.items()
        if key in known and not fits(value, known[key][0]) and _is_readable(value, known[key][0])
    }
    return {**given, **changed} if changed else given


def parameters_of(owner: Any) -> tuple[Mapping[str, tuple[Any, Any]], bool]:
    """Return type and default of each option of a class, and whether it may have others too."""
    return _parameters_of(owner)


@cache
def _parameters_of(owner: Any) -> tuple[Mapping[str, tuple[Any, Any]], bool]:
    known: dict[str, tuple[Any, Any]] = {}
    for base in owner.__mro__:
        constructor = vars(base).get("__init__")
        if not inspect.isfunction(constructor):
            continue
        try:
            # fields have the names of the module that declares them
            kinds = typing.get_type_hints(base if is_dataclass(base) else constructor)
        except NameError:  # a type that is imported for type checkers only
            return known, True
        parameters = list(inspect.signature(constructor).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind not in _VARIABLE:
                kind = kinds.get(parameter.name, Any)
                known.setdefault(parameter.name, (kind, parameter.default))
        if all(parameter.kind not in _VARIABLE for parameter in parameters):
            return known, False
        if not base.__module__.startswith("lrlhf."):
            return known, True
        # the next class takes the rest
    return known, True


def fits(value: Any, kind: Any) -> bool:
    """Whether a value has a type already."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in _UNIONS:
        return any(fits(value, part) for part in parts)
    if origin is typing.Annotated:
        return fits(value, parts[0])
    if origin is typing.Literal:
        return any(value is part or (value == part and isinstance(value, str)) for part in parts)
    if kind in (None, str, int, float):
        return isinstance(value, _KINDS[kind]) and not isinstance(value, bool)
    container = origin or kind
    if kind is Any or not isinstance(container, type):
        return True  # or a type variable
    if typing.Protocol in container.__mro__:  # rows of data, of which a dict is columns
        return not (isinstance(value, Mapping) and "class_path" in value)
    return isinstance(value, container) and (not parts or _holds(value, container, parts))


def _holds(value: Any, container: type, parts: tuple[Any, ...]) -> bool:
    """Whether the entries of a container have their types."""
    if issubclass(container, Mapping):
        return all(fits(entry, parts[1]) for entry in value.values())
    if container is tuple and Ellipsis not in parts:
        return len(value) == len(parts) and all(map(fits, value, parts))
    if issubclass(container, Collection):
        return not isinstance(value, str) and all(fits(entry, parts[0]) for entry in value)
    return True


def _is_readable(value: Any, kind: Any) -> bool:
    """Whether a config could say a value, or its type is none that only Python knows."""
    union = typing.get_origin(kind) in _UNIONS
    closed = all(map(_is_closed, typing.get_args(kind) if union else (kind,)))
    return closed or _is_plain(value)


def _is_closed(kind: Any) -> bool:
    plain = isinstance(kind, type) and issubclass(kind, PLAIN)
    return plain or is_dataclass(kind) or typing.get_origin(kind) is typing.Literal


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):  # but not functions by name
        return not any(map(callable, value.values()))
    return isinstance(value, PLAIN) or is_dataclass(value)


def no_group(kind: type, value: Any) -> str:
    """Say that a value is no group of options."""
    shown = repr(value) if isinstance(value, PLAIN) else f"a {type(value).__name__}"
    return f"expected the options of {kind.__name__} as a mapping, got {shown}"


def _parsed(owner: str, name: str, kind: Any, value: Any) -> Any:
    """Read a value as the command line does."""
    # they take a while to import, and most arguments need none of it
    from jsonargparse import ArgumentError  # noqa: PLC0415

    from lrlhf.options.complaints import read_complaint  # noqa: PLC0415
    from lrlhf.options.parser import Parser, mark_quoted  # noqa: PLC0415

    kinds = typing.get_args(kind) if typing.get_origin(kind) in _UNIONS else (kind,)
    groups = [part for part in kinds if is_dataclass(part) and isinstance(part, type)]
    if len(groups) == 1 and isinstance(value, Mapping) and "class_path" not in value:
        return groups[0](**value)  # which converts its own options
    if groups == [kind] and not isinstance(value, Mapping):
        raise TypeError(f"{owner}: {name}: {no_group(kind, value)}")
    parser = Parser(exit_on_error=False)
    parser.add_argument(f"--{name}", type=kind)
    try:
        return parser.instantiate(parser.parse_object({name: mark_quoted(value)}))[name]
    except ArgumentError as error:
        complaint = read_complaint(str(error))
    except ValueError as error:  # a constructor refuses a value, as a report of the parser or not
        raise ValueError(str(read_complaint(str(error)))) from error
    key = ".".join(step for step in complaint.path if isinstance(step, str))
    is_type = type(value) is not str or not complaint.choices
    raise (TypeError if is_type else ValueError)(f"{owner}: {key or name}: {complaint}")


def _unknown(owner: str, name: str, known: Collection[str]) -> str:
    from lrlhf.options.parser import near_miss  # noqa: PLC0415

    nearest = near_miss((name,), known) or hint(name, known)
    return f"{owner} has no option '{name}'{nearest}"
