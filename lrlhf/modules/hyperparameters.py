"""What a module was constructed with, as a checkpoint holds it, and the module built again from it.

A checkpoint is read without running code, so it holds plain values only: settings field by field,
functions and classes by their import path. Models, lambdas and whatever else has no such form are
noted with the reason, and are asked for when the module is built again.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lrlhf.arguments import given_arguments
from lrlhf.foreign_files import foreign_code, read_yaml
from lrlhf.functional.algorithm import Algorithm
from lrlhf.models.sharding import CheckpointMismatchError
from lrlhf.run.log_rows import without_secrets
from lrlhf.secrets import HIDDEN

ModuleT = TypeVar("ModuleT")

_PLAIN_KINDS: tuple[tuple[Callable[[Any], Any], Any], ...] = (
    (bool, bool | np.bool_),
    (int, int | np.integer),
    (float, float | np.floating),
    (str.__str__, str),
)
"""How values that are plain but for their class, such as ``np.float64``, are made plain."""
_UNTYPED = (type(None), bool, int, float, str, list, tuple, Mapping)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

_OURS = re.compile(r"lrlhf\.modules\.")
CLASS, NOT_KEPT = "_class_path", "_not_kept"


class _NotPlainError(Exception):
    """A value has no plain form; says what it is."""


def as_hyperparameters(kind: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return constructor arguments in plain values without secrets, as LightningCLI stores them."""
    plain: dict[str, Any] = {
        CLASS: _import_path(kind) if _is_importable(kind) else kind.__qualname__
    }
    reasons = {}
    for name, value in arguments.items():
        try:
            plain[name] = _plain(value)
        except _NotPlainError as error:
            reasons[name] = str(error)
    stored: dict[str, Any] = without_secrets(plain)
    return {**stored, NOT_KEPT: reasons} if reasons else stored


def _plain(value: Any) -> Any:
    if value is None:
        return None
    for plain, kinds in _PLAIN_KINDS:
        if isinstance(value, kinds):
            return plain(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, Algorithm):
        # not at the top: supervised training and reward models need none of them
        from lrlhf.functional.algorithms import ALGORITHMS  # noqa: PLC0415

        if ALGORITHMS.get(value.name) is value:
            return value.name
    if inspect.isroutine(value) or isinstance(value, type):
        return _path_of(value, f"the function {value.__qualname__} of {value.__module__}")
    return _plain_object(value)


def _plain_object(value: Any) -> dict[str, Any]:
    kind = type(value)
    options = given_arguments(value)
    if options is None:
        raise _NotPlainError(f"a {kind.__name__}")
    stored: dict[str, Any] = {
        "class_path": _path_of(kind, f"a {kind.__name__} of {kind.__module__}"),
        "init_args": {},
    }
    parameters = inspect.signature(kind).parameters
    for name, part in options.items():
        parameter = parameters.get(name)
        named = parameter is not None and parameter.kind not in _VARIABLE
        # as jsonargparse names what only a constructor's **options take, which has no type
        if not named and (parameter is not None or not isinstance(part, _UNTYPED)):
            raise _NotPlainError(
                f"a {kind.__name__} with {name}, which its constructor does not name"
            )
        stored.setdefault("init_args" if named else "dict_kwargs", {})[name] = _plain(part)
    return stored


def _import_path(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _is_importable(value: Any) -> bool:
    """Tell whether another process finds the same thing under its name."""
    there: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        there = getattr(there, name, None)
    return there is value and value.__module__ != "__main__"


def _path_of(value: Any, what: str) -> str:
    if not _is_importable(value):
        raise _NotPlainError(f"{what}, which cannot be imported")
    return _import_path(value)


# ---------------------------------------------------------------- building it again


def build_again(
    kind: type[ModuleT], stored: Mapping[str, Any], changed: Mapping[str, Any], *, where: Path
) -> ModuleT:
    """Construct a module from what a checkpoint holds.

    Args:
        kind: The class, or one that it derives from.
        stored: What `as_hyperparameters` or LightningCLI has stored.
        changed: Arguments that take the place of stored ones.
        where: The checkpoint, for errors.

    Raises:
        ValueError: An argument is needed that the checkpoint does not hold; names all of them.
    """
    options = dict(stored)
    kind = _class_of(options.pop(CLASS, None), kind, where)
    reasons = dict(options.pop(NOT_KEPT, {}))
    options.pop("_instantiator", None)
    for name, value in options.items():
        if any(map(_is_hidden, _leaves(value))):
            reasons[name] = "it has a secret"
        elif foreign := next(foreign_code({name: value}, imported=_imported()), None):
            reasons[name] = foreign
    for name, parameter in inspect.signature(kind).parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind not in _VARIABLE
        if needed and name not in options:
            reasons.setdefault(name, "it is not stored")
    if missing := {name: why for name, why in reasons.items() if name not in changed}:
        call = ", ".join(f"{name}=..." for name in missing)
        explained = "; ".join(f"{name}: {why}" for name, why in missing.items())
        raise ValueError(
            f"{where} does not hold all that {kind.__name__} was built from ({explained}): pass "
            f"it, {kind.__name__}.load_from_checkpoint(path, {call})"
        )
    stored_options = {name: value for name, value in options.items() if name not in changed}
    try:
        return kind(**stored_options, **changed)
    except TypeError as error:
        raise ValueError(
            f"what {where} says {kind.__name__} was built from does not fit this version: {error}; "
            "pass what has changed as arguments of load_from_checkpoint"
        ) from error


def refuse_other_module(kind: type, checkpoint: Mapping[str, Any], where: str) -> None:
    """Refuse a checkpoint of another of lrlhf's modules, by the class that it names.

    Args:
        kind: Class of the module that is to be filled.
        checkpoint: As it was saved, with or without its tensors.
        where: What messages call it.

    Raises:
        CheckpointMismatchError: It is of a class that ``kind`` neither derives from nor is a base
            of.
    """
    path = str(checkpoint.get("hyper_parameters", {}).get(CLASS, ""))
    name = path.rpartition(".")[2]
    saved = getattr(import_module("lrlhf.modules"), name, None) if _OURS.match(path) else None
    if isinstance(saved, type) and not (issubclass(kind, saved) or issubclass(saved, kind)):
        raise CheckpointMismatchError(
            f"{where} is a checkpoint of {name}, not of {kind.__name__}: to start from its "
            "weights, write them with `lrlhf export` and name that folder as the model"
        )


def _class_of(path: str | None, kind: type[ModuleT], where: Path) -> type[ModuleT]:
    """Find the class that was stored, among those that are imported or lie beside ``kind``."""
    if path is None or path in {_import_path(kind), kind.__qualname__}:
        return kind
    module, _, name = path.rpartition(".")
    if module.startswith("lrlhf."):
        import_module(module)
    candidate = getattr(sys.modules.get(module), name, None)
    if candidate is None:
        raise ValueError(f"{where} is a checkpoint of {path}: import its module first")
    if not (isinstance(candidate, type) and issubclass(candidate, kind)):
        raise ValueError(f"{where} is a checkpoint of {path}, not of {kind.__name__}")
    return candidate


def _is_hidden(leaf: Any) -> bool:
    return isinstance(leaf, str) and (leaf == HIDDEN or f"://{HIDDEN}@" in leaf)


def _leaves(value: Any) -> Iterator[Any]:
    """Go through the values inside a config."""
    if isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(part)
    else:
        yield value


def _imported() -> set[str]:
    """Modules that the user's program has imported; those of Python itself may do anything."""
    return {name for name in sys.modules if name.partition(".")[0] not in sys.stdlib_module_names}


def read_hyperparameters(file: Path) -> dict[str, Any]:
    """Read a YAML file of hyperparameters, such as a logger has written."""
    read = read_yaml(file)
    if not isinstance(read, dict):
        raise ValueError(f"{file} is no mapping of hyperparameters")
    return read
