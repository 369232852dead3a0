"""Functions that a policy can call: their schemas for chat templates, and their calls.

From top to bottom: `Tool` with its check of arguments, how tools are made from functions and
methods, results as text, and the part of JSON schema that type hints need.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import functools
import inspect
import json
import math
import reprlib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from types import NoneType
from typing import Any
from uuid import UUID

import numpy as np
from PIL import Image
from torch import Tensor
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from lrlhf.environments.tool_calls import STRICT_JSON
from lrlhf.functional.names import import_value
from lrlhf.media.decode import MediaOptions
from lrlhf.media.parts import data_keys, kind_of, read_parts
from lrlhf.types import Message

JSON_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    NoneType: "null",
}
NOT_TOOLS = frozenset(
    {"reset", "reward", "get_reward", "done", "close", "malformed_call", "offered_tools"}
)
"""Methods of an environment that are for the run and not for the policy."""

_HOW = (
    "a tool needs a docstring, a type hint for each argument (str, int, float, bool, list, dict) "
    "and, under `Args:`, a line `name: what it is` for each; the name of a method that is no tool "
    "begins with an underscore"
)
_UNNAMED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
)
_HINTS = (*JSON_TYPES, tuple, Any)


class ToolArgumentsError(ValueError):
    """A call's arguments are not those of its tool, which was not called."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy can call, or a method of its environment."""

    name: str
    function: Callable[..., Any]
    """Takes the arguments by name."""
    schema: Mapping[str, Any]
    """As chat templates take it: ``{"type": "function", "function": {"name", "description",
    "parameters"}}``, the parameters in JSON schema."""

    @classmethod
    def described(
        cls,
        name: str,
        function: Callable[..., Any],
        description: str,
        parameters: Mapping[str, Any],
    ) -> Tool:
        """Return a tool that a server describes, with its parameters in JSON schema."""
        own = {"name": name, "description": description, "parameters": parameters}
        return cls(name, function, {"type": "function", "function": own})

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Check the arguments, and call the function with them.

        Returns:
            What the function returns; an awaitable, if it is async.

        Raises:
            ToolArgumentsError: See `accepted`. Whatever else is raised is the function's own.
        """
        return self.function(**self.accepted(arguments))

    def accepted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as the function takes them.

        A text that stands for a value of the required type becomes that value, ``"3"`` becomes 3:
        some formats of calls have only text. ``"null"`` is None where a value may be null.

        Args:
            arguments: Of the policy's call, values as JSON has them.

        Raises:
            ToolArgumentsError: One is unknown, missing or of another type; for the policy to read.
        """
        parameters = self.schema["function"]["parameters"]
        properties = parameters.get("properties", {})
        required = parameters.get("required", ())
        accepted: dict[str, Any] = {}
        problems = [f"{name!r} is missing" for name in required if name not in arguments]
        for name, value in arguments.items():
            if name not in properties:
                if parameters.get("additionalProperties", False) is not False:
                    accepted[name] = value
                    continue
                problems.append(f"there is no argument {name!r}")
                continue
            if fitting := _fitting_values(value, properties[name]):
                accepted[name] = fitting[0]
            else:
                kind = _described(properties[name])
                problems.append(f"{name!r} must be {kind}, not {reprlib.repr(value)}")
        if problems:
            signature = ", ".join(
                f"{name} ({_described(schema)}{'' if name in required else ', optional'})"
                for name, schema in properties.items()
            )
            raise ToolArgumentsError(
                f"wrong arguments: {'; '.join(problems)}. {self.name} takes {signature or 'none'}"
            )
        return accepted


NamedTool = str | Tool | Callable[..., Any]
"""A tool, a function that is one, or the import path of either."""


def tools_of(environment: Any) -> list[Tool]:
    """Return the public methods of an environment, inherited ones first, as they are defined.

    The schemas are made once per class. `NOT_TOOLS` are left out, and so is whatever is no method:
    properties are not read. Behind them come the tools that its method ``offered_tools`` returns,
    if it has one: those that are known only at run time, with schemas of their own.

    Raises:
        ValueError: A method has no docstring, or one that does not explain an argument, or a type
            hint is missing or not for values of JSON.
    """
    methods = [
        Tool(name, getattr(environment, name), schema)
        for name, schema in schemas_of(environment.__class__).items()
    ]
    offered = getattr(environment, "offered_tools", None)
    return [*methods, *(offered() if callable(offered) else ())]


def tools_of_functions(functions: Iterable[NamedTool]) -> list[Tool]:
    """Return plain functions as tools.

    Args:
        functions: In the order of the chat template.

    Raises:
        ValueError: See `tools_of`. Or one cannot be imported or is no function, or two have the
            same name.
    """
    if isinstance(functions, str) or not isinstance(functions, Iterable):
        raise ValueError("tools must be a list of functions, even if it is only one")
    tools = []
    for function in functions:
        tool: Any = function
        if isinstance(function, str):
            if "." not in function:
                raise ValueError(
                    f"tool {function!r} is no import path, such as my_package.tools.search"
                )
            tool = import_value("tool", function, ())
        if not isinstance(tool, Tool):
            if not inspect.isroutine(tool):
                raise ValueError(
                    f"tool {function!r} is a {type(tool).__name__}: give a function; a class with "
                    "state is an environment"
                )
            tool = Tool(tool.__name__, tool, _schema(tool, tool.__name__, tool.__name__))
        tools.append(tool)
    return list(tools_by_name(tools).values())


def tools_by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Return tools by their names.

    Raises:
        ValueError: Two have the same.
    """
    by_name: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in by_name:
            raise ValueError(
                f"two tools are called {tool.name!r}: rename one, be it a function among tools or "
                "a method of the environment"
            )
        by_name[tool.name] = tool
    return by_name


@functools.cache
def schemas_of(environment: type) -> Mapping[str, Mapping[str, Any]]:
    """Return the schemas of the tools of a class of environments, by name.

    Raises:
        ValueError: See `tools_of`.
    """
    names = dict.fromkeys(name for base in reversed(environment.__mro__) for name in vars(base))
    return {
        name: _schema(getattr(environment, name), name, f"{environment.__name__}.{name}")
        for name in names
        if not name.startswith("_") and name not in NOT_TOOLS and _is_method(environment, name)
    }


def _is_method(environment: type, name: str) -> bool:
    value = inspect.getattr_static(environment, name)
    if isinstance(value, classmethod):
        return True
    # a cached_property is a routine too, but cannot be called
    return inspect.isroutine(value) and callable(value)


def _schema(function: Callable[..., Any], name: str, shown: str) -> Mapping[str, Any]:
    """Make the schema of a function.

    Args:
        function: Without its ``self``.
        name: In the calls of the policy.
        shown: Its name in errors.
    """
    try:
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in _UNNAMED:
                raise ValueError(f"the argument {parameter} has no name for the policy to give")
        schema = get_json_schema(function)
        hints = typing.get_type_hints(function)
    except (
        *(DocstringParsingException, TypeHintParsingException),
        *(NameError, AttributeError, TypeError, ValueError),
    ) as error:
        reason = " ".join(str(part) for part in error.args)
        raise ValueError(
            f"tool {shown!r} cannot be described to the policy: {reason}; {_HOW}"
        ) from error
    for argument in schema["function"]["parameters"]["properties"]:
        for hint in _leaves(hints[argument]):
            if hint not in _HINTS and not typing.is_typeddict(hint):
                raise ValueError(
                    f"tool {shown!r}: the argument {argument!r} is a "
                    f"{getattr(hint, '__name__', hint)}, which no call can give; take what JSON "
                    "has (str, int, float, bool, list, dict) and make it in the function"
                )
    return {**schema, "function": {**schema["function"], "name": name}}


def _leaves(hint: Any) -> Iterator[Any]:
    """Yield the types that a type hint is made of."""
    if typing.get_origin(hint) is typing.Literal:
        return
    inner = typing.get_args(hint)
    if not inner:
        yield hint
    for part in inner:
        yield from _leaves(part)


class UnreadableResultError(ValueError):
    """A tool or an environment returned a value that has no form as text."""


def result_text(value: Any) -> str:
    """Return a tool's result as text for the policy.

    Args:
        value: Text stands as it is, and None becomes empty. Anything else becomes JSON: also
            arrays, tensors, dataclasses and models of pydantic, dates and times, ``Decimal``,
            ``UUID`` and paths, which are texts there, and the values of enumerations.

    Returns:
        Text that UTF-8 can hold: half of a surrogate pair becomes a question mark.

    Raises:
        UnreadableResultError: JSON cannot hold all of it.
    """
    if value is None:
        return ""
    try:
        plain = _plain(value)
        text = plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
    except RecursionError:
        raise UnreadableResultError(
            f"{_kind(value)} that is nested too deeply or holds itself; return less of it"
        ) from None
    except UnreadableResultError:
        raise
    except Exception as error:  # of a tensor without values, a number of 5000 digits, a model
        raise UnreadableResultError(f"{_kind(value)} that cannot be read: {error}") from error
    return text.encode("utf-8", "replace").decode("utf-8")


def result_content(value: Any, media: MediaOptions | None) -> str | list[Message]:
    """Return a tool's result as a policy reads it that sees images.

    Args:
        value: An image (a ``PIL.Image``, or a part of a message with one), or a list of images,
            texts and text parts. Anything else is text, see `result_text`.
        media: How images are read; None: the policy reads text only.

    Raises:
        BadRow: See `lrlhf.media.parts.read_parts`.
        UnreadableResultError: See `result_text`.
    """
    entries = value if isinstance(value, list | tuple) else [value]
    if media is None or not any(map(_shows, entries)) or not all(map(_is_part, entries)):
        return result_text(value)
    texts = (result_text(entry) if isinstance(entry, str) else entry for entry in entries)
    return read_parts([*texts], media)


def mcp_content(blocks: Sequence[Mapping[str, Any]]) -> str | list[Any]:
    """Return a result of the Model Context Protocol as `result_content` takes it.

    Raises:
        ValueError: A block is neither text nor an image.
    """
    parts: list[Any] = []
    for block in blocks:
        if block["type"] == "image":
            # as bytes, which no text has a form for
            if not block.get("data"):
                raise ValueError("an image without data")
            try:
                image = base64.b64decode(block["data"], validate=True)
            except ValueError as error:
                raise ValueError(f"an image that is no base64: {error}") from error
            parts.append({"type": "image", "image": image})
            continue
        parts.append(block.get("resource", block).get("text"))
        if parts[-1] is None:
            raise ValueError(f"content of type {block['type']}, no text and no image")
    is_text = all(isinstance(part, str) for part in parts)
    return "\n".join(filter(None, parts)) if is_text else parts


def mcp_text(content: str | Sequence[Any]) -> str:
    """Return the texts of what `mcp_content` gave."""
    texts = [content] if isinstance(content, str) else content
    return "\n".join(part for part in texts if isinstance(part, str))


def _shows(entry: Any) -> bool:
    """Whether an entry is an image, or a part of a message: mappings with other keys are JSON."""
    if isinstance(entry, Image.Image):
        return True
    if not isinstance(entry, Mapping) or not isinstance(entry.get("type"), str):
        return False
    kind = kind_of(entry)
    if kind is None:
        return False
    data = (*data_keys(kind), "data")
    return any(entry.get(name) is not None for name in data) or entry.keys() <= {"type", *data}


def _is_part(entry: Any) -> bool:
    if isinstance(entry, Mapping) and entry.get("type") == "text":
        return isinstance(entry.get("text"), str)
    return _shows(entry) or isinstance(entry, str)


def _plain(value: Any) -> Any:
    """Return all of a value as JSON holds it.

    Raises:
        UnreadableResultError: JSON has no form for a part of it.
    """
    if value is None or isinstance(value, str | bool | int | float):
        if isinstance(value, float) and not math.isfinite(value):
            raise UnreadableResultError(f"{value}, no number of JSON; return None or a text")
        return value
    if isinstance(value, Mapping):
        return _plain_mapping(value)
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Tensor | np.ndarray | np.generic):
        if not isinstance(value, Tensor) and value.dtype.kind in "MmV":
            # numbers of unknown units, or rows without the names of their fields
            raise UnreadableResultError(f"{_kind(value)} of {value.dtype}; {_INSTEAD}")
        return _plain(value.tolist())
    return _plain_object(value)


def _plain_object(value: Any) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal | UUID | PurePath):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)) and not isinstance(value, type):
        return _plain(dump())
    raise UnreadableResultError(f"{_kind(value)}, which JSON has no form for; {_INSTEAD}")


def _plain_mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, entry in value.items():
        if not isinstance(key, str | bool | int | float | NoneType):
            raise UnreadableResultError(
                f"{_kind(value)} with a key that is {_kind(key)}, where JSON has texts; {_INSTEAD}"
            )
        # as `json` writes them
        plain[key if isinstance(key, str) else json.dumps(_plain(key))] = _plain(entry)
    if len(plain) < len(value):
        raise UnreadableResultError(f"{_kind(value)} with keys that JSON cannot tell apart")
    return plain


def _kind(value: Any) -> str:
    """Name a value by its type alone: its repr may have an address in memory."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


_INSTEAD = (
    "return a text, or what JSON can hold: numbers, lists and dicts with texts as keys (of a set "
    "or a generator a list, of a data frame its records). Images, alone or in a list with texts, "
    "are shown to policies that see them"
)


_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def _fitting_values(value: Any, schema: Mapping[str, Any]) -> list[Any]:
    """Return the readings of an argument that fit its schema, the best first.

    A text may be the value that is written there, and ``null`` None where the schema allows it.
    """

    def readings() -> Iterator[Any]:
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

    fitting = [reading for reading in readings() if _matches(reading, schema)]
    if isinstance(value, str) and "enum" not in schema and _allows_null(schema):
        fitting.sort(key=lambda reading: reading is not None)
    return fitting


def _allows_null(schema: Mapping[str, Any]) -> bool:
    """Whether a schema has null as a type of its own."""
    options = schema.get("anyOf", ())
    return (
        bool(schema.get("nullable")) or "null" in _kinds(schema) or any(map(_allows_null, options))
    )


def _kinds(schema: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = schema.get("type", ())
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def _matches(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value fits a schema, in the part of JSON schema that type hints need."""
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
        if "prefixItems" in schema:
            items = schema["prefixItems"]
            return len(value) == len(items) and all(map(_matches, value, items))
        return all(_matches(entry, schema.get("items", {})) for entry in value)
    inner = schema.get("additionalProperties")
    if isinstance(value, dict) and isinstance(inner, Mapping):
        return all(_matches(entry, inner) for entry in value.values())
    return True


def _described(schema: Mapping[str, Any]) -> str:
    """Describe in words what a schema allows."""
    if "enum" in schema:
        values = (json.dumps(value, ensure_ascii=False) for value in schema["enum"])
        text = f"one of {', '.join(values)}"
    elif "anyOf" in schema:
        text = " or ".join(map(_described, schema["anyOf"]))
    else:
        text = " or ".join(_kinds(schema)) or "any value"
        if "prefixItems" in schema:
            text += f" of {', '.join(map(_described, schema['prefixItems']))}"
        inner = schema.get("items", schema.get("additionalProperties"))
        if isinstance(inner, Mapping):
            text += f" of {_described(inner)}"
    return f"{text} or null" if schema.get("nullable") else text
