"""Values that a policy gives for the arguments of tools, and the JSON schemas that they fit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any

from lrlhf.environments.strict_json import STRICT_JSON

JSON_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    NoneType: "null",
}
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def fitting_values(value: Any, schema: Mapping[str, Any]) -> list[Any]:
    """Return what a value may stand for that fits a schema, the best first.

    Args:
        value: As the policy gave it. A text may be the value that is written there; ``null`` is
            None where the schema says so itself.
        schema: Of the argument, the part of JSON schema that hints need.
    """
    fitting = [one for one in _readings(value) if _matches(one, schema)]
    if isinstance(value, str) and "enum" not in schema and _takes_null(schema):
        fitting.sort(key=lambda one: one is not None)
    return fitting


def _readings(value: Any) -> Iterator[Any]:
    """Yield a value and, if it is a text, the value that is written there."""
    yield value
    if not isinstance(value, str):
        return
    if value.strip() in _PYTHON_WORDS:
        yield _PYTHON_WORDS[value.strip()]
        return
    try:
        yield STRICT_JSON.decode(value)
    except (ValueError, RecursionError):
        return


def _takes_null(schema: Mapping[str, Any]) -> bool:
    """Whether a schema says itself that a value may be null."""
    options = schema.get("anyOf", ())
    return (
        bool(schema.get("nullable")) or "null" in _kinds(schema) or any(map(_takes_null, options))
    )


def _kinds(schema: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = schema.get("type", ())
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def _matches(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value is what a schema asks for, in the part of JSON schema that hints need."""
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(_matches(value, option) for option in schema["anyOf"])
    kinds, kind = _kinds(schema), JSON_TYPES.get(type(value), "")
    if kinds and kind not in kinds and not (kind == "integer" and "number" in kinds):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, list):
        return _matches_items(value, schema)
    inner = schema.get("additionalProperties")
    if isinstance(value, dict) and isinstance(inner, Mapping):
        return all(_matches(entry, inner) for entry in value.values())
    return True


def _matches_items(values: list[Any], schema: Mapping[str, Any]) -> bool:
    if "prefixItems" in schema:
        wanted = schema["prefixItems"]
        return len(values) == len(wanted) and all(map(_matches, values, wanted))
    return all(_matches(value, schema.get("items", {})) for value in values)


def wanted(schema: Mapping[str, Any]) -> str:
    """Say what a schema asks for."""
    if "enum" in schema:
        text = "one of " + ", ".join(json.dumps(one, ensure_ascii=False) for one in schema["enum"])
    elif "anyOf" in schema:
        text = " or ".join(map(wanted, schema["anyOf"]))
    else:
        text = " or ".join(_kinds(schema)) or "any value"
        if "prefixItems" in schema:
            text += f" of {', '.join(map(wanted, schema['prefixItems']))}"
        inner = schema.get("items", schema.get("additionalProperties"))
        if isinstance(inner, Mapping):
            text += f" of {wanted(inner)}"
    return f"{text} or null" if schema.get("nullable") else text
