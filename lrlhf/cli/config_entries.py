"""Reads what a config says of a class, without building it."""

from __future__ import annotations

from collections.abc import Mapping
from pydoc import locate as import_by_path
from typing import Any, TypeVar

from lrlhf.models import LoRA, PretrainedSpec

SpecT = TypeVar("SpecT", bound=PretrainedSpec)


def options_of(entry: Any) -> Mapping[str, Any]:
    """Return the options of a class or a dataclass, however the config spells it."""
    if not isinstance(entry, Mapping):
        return {}
    return (entry.get("init_args") or {}) if "class_path" in entry else entry


def class_of(entry: Any) -> type | None:
    """Return the class that an entry with a ``class_path``, or such a path, stands for."""
    path = entry.get("class_path") if isinstance(entry, Mapping) else entry
    kind = import_by_path(path) if isinstance(path, str) else None
    return kind if isinstance(kind, type) else None


def is_a(entry: Any, base: type) -> bool:
    """Whether an entry stands for a class below ``base``."""
    kind = class_of(entry)
    return kind is not None and issubclass(kind, base)


def is_lrlhf(entry: Any) -> bool:
    """Whether an entry stands for a class of this library, whose constructor is known."""
    kind = class_of(entry)
    return kind is not None and kind.__module__.startswith("lrlhf.")


def spec_of(entry: str | Mapping[str, Any], cls: type[SpecT], **defaults: Any) -> SpecT:
    """Build the description of a model that a config gives: a source, or options.

    ``defaults`` are the options that a plain source is used with.
    """
    if isinstance(entry, str):
        return cls(source=entry, **defaults)
    options = dict(options_of(entry))
    if options.get("lora") is not None:
        options["lora"] = LoRA(**options_of(options["lora"]))
    return cls(**options)
