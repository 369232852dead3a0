"""What an object was constructed with: for ``repr``, and for checkpoints that build it again."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from reprlib import Repr
from typing import Any, Final

from lrlhf.options.conversion import converting, parameters_of
from lrlhf.secrets import HIDDEN, hide, is_secret_name

_MISSING: Final = inspect.Parameter.empty
_ARGUMENTS: Final = "_given_arguments"
_BUILT: Final = "_is_constructed"
_MOST: Final = 6
"""Entries of a longer list are not all shown."""
_SHORTENED: Final = Repr()
_SHORTENED.maxstring = _SHORTENED.maxother = 60


class TakesOptions:
    """Base of objects whose constructors take what a config has, and remember what they took."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = converting(_keeping(cls.__init__), cls)  # type: ignore[method-assign]


class ShowsOptions(TakesOptions):
    """Base of objects whose options can be read, and are set only where that changes something."""

    def option_in_force(self, name: str) -> Any:
        """Return the value of an option that is no attribute.

        Raises:
            KeyError: There is no such option.
        """
        _, default = parameters_of(type(self))[0][name]
        return (given_arguments(self) or {}).get(name, default)

    def __getattr__(self, name: str) -> Any:
        try:  # a module has its parts behind this
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if self.__dict__.get(_BUILT) and name in parameters_of(type(self))[0]:
                return self.option_in_force(name)
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=self) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get(_BUILT) and self.is_fixed(name):
            kind = type(self).__name__
            raise AttributeError(
                f"{name} is an option that {kind} reads when it is built, so a change would do "
                f"nothing: build another, {kind}(..., {name}=...)"
            )
        super().__setattr__(name, value)

    def is_fixed(self, name: str) -> bool:
        """Whether a name is an option that nothing reads after the constructor."""
        if name not in parameters_of(type(self))[0] or name in vars(self):
            return False
        try:
            super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            return not hasattr(type(self), name)
        return False


class KeepsArguments(TakesOptions):
    """Base of objects that show the arguments that their constructors were called with.

    Example:
        >>> RegexFormat("<think>.*", full_match=False)
        RegexFormat(pattern='<think>.*', full_match=False)
    """

    def __repr__(self) -> str:
        return described(type(self), given_arguments(self) or {})


def _keeping(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def constructor(self: Any, *args: Any, **options: Any) -> None:
        if getattr(type(self).__init__, "__wrapped__", None) is not constructor:  # of a subclass
            init(self, *args, **options)
            return
        self.__dict__[_ARGUMENTS] = _bound(signature, self, args, options)
        init(self, *args, **options)
        self.__dict__[_BUILT] = True

    return constructor


def _bound(
    signature: inspect.Signature, instance: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Any]:
    try:
        bound = signature.bind(instance, *args, **options).arguments
    except TypeError:  # the constructor itself says it better
        return {}
    _, *values = bound.items()
    named: dict[str, Any] = {}
    for name, value in values:
        variable = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        named |= value if variable else {name: value}
    return named


def given_arguments(instance: object) -> Mapping[str, Any] | None:
    """Return the arguments that an object was constructed with, by name; None: nobody knows.

    Defaults are left out, but not those of a dataclass.
    """
    arguments: Mapping[str, Any] | None = getattr(instance, _ARGUMENTS, None)
    if arguments is None and is_dataclass(instance):
        return {
            field.name: getattr(instance, field.name) for field in fields(instance) if field.init
        }
    if arguments is None and isinstance(instance, KeepsArguments):
        return None if inspect.signature(type(instance)).parameters else {}
    return arguments


def all_arguments(instance: object) -> dict[str, Any]:
    """Return the arguments that an object was constructed with, its class's defaults included."""
    given = dict(given_arguments(instance) or {})
    parameters = inspect.signature(type(instance)).parameters.values()
    known = {one.name: given.get(one.name, one.default) for one in parameters}
    return {name: value for name, value in (known | given).items() if value is not _MISSING}


def described(kind: type, arguments: Mapping[str, Any]) -> str:
    """Write a call of a constructor in one line, long values shortened, secrets as ``***``."""
    listed = ", ".join(f"{name}={_named(name, value)}" for name, value in arguments.items())
    return f"{kind.__qualname__}({listed})"


def _named(name: object, value: Any) -> str:
    return short_text(
        HIDDEN if value and isinstance(value, str) and is_secret_name(str(name)) else value
    )


def short_text(value: Any) -> str:
    """Write a value in a few words."""
    if is_dataclass(value) and not isinstance(value, type):
        return described(type(value), changed_fields(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_named(key, part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple) and len(value) <= _MOST:
        marks = "[]" if isinstance(value, list) else "()"
        return marks[0] + ", ".join(map(short_text, value)) + marks[1]
    if inspect.isroutine(value):
        return str(value.__qualname__)
    if isinstance(value, KeepsArguments):
        return repr(value)
    # hidden first: of what is cut off, nobody sees any more that it was a password
    return _SHORTENED.repr(hide(value)) if isinstance(value, str) else hide(_SHORTENED.repr(value))


def changed_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that do not have their default value."""
    default = {}
    for field in fields(value):
        if field.init and field.repr:
            default[field.name] = (
                field.default_factory() if callable(field.default_factory) else field.default
            )
    own = {name: getattr(value, name) for name in default}
    return {name: part for name, part in own.items() if repr(part) != repr(default[name])}
