"""The formats of tool calls by name, by import path, by a pattern, or by a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import regex
from jinja2 import TemplateError

from lrlhf.bounded_templates import render_jinja_template
from lrlhf.environments.tool_calls import (
    MalformedCall,
    ToolCall,
    ToolCallFormat,
    deepseek,
    hermes,
    llama3_json,
    mistral,
    python,
    qwen3_coder,
)
from lrlhf.functional.names import import_function

TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "mistral": mistral,
    "deepseek": deepseek,
    "python": python,
    # reads JSON calls between any tags, so that the others come first
    "llama3_json": llama3_json,
}
"""The built-in formats by name, in the order in which `detect_format` tries them."""


class RegexCalls:
    """Reads calls by a regular expression, for the formats that few-shot prompts teach.

    Its named groups are the arguments, as texts; a group that took no part is left out. A match
    whose group ``tool`` took no part is malformed.

    Args:
        pattern: In the syntax of the ``regex`` package, which is that of ``re`` and more. Each
            match is a call; ``.`` does not match line breaks.
        tool: Name of the tool; None: the group ``tool`` names it.
        timeout: Seconds for one turn; a text that takes longer is one malformed call.

    Raises:
        ValueError: The pattern is not valid, or does not say which tool is called.
    """

    def __init__(self, pattern: str, tool: str | None = None, timeout: float = 5.0) -> None:
        try:
            self._pattern = regex.compile(pattern)
        except regex.error as error:
            raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error
        if ("tool" in self._pattern.groupindex) == (tool is not None):
            raise ValueError(
                f"pattern {pattern!r} and tool={tool!r}: either give the tool's name or have a "
                "group (?P<tool>…) that matches it"
            )
        self._tool = tool
        self._timeout = timeout

    def __call__(self, text: str) -> list[ToolCall | MalformedCall]:
        try:
            matches = list(self._pattern.finditer(text, timeout=self._timeout))
        except TimeoutError:
            return [MalformedCall(text, "the text cannot be searched for calls in time")]
        return [self._call(match) for match in matches]

    def _call(self, match: Any) -> ToolCall | MalformedCall:
        groups = {name: value for name, value in match.groupdict().items() if value is not None}
        name = groups.pop("tool", self._tool)
        if not name:
            return MalformedCall(match.group(), "the call names no tool")
        return ToolCall(name, groups, match.start(), match.end())


def tool_call_format(given: str | ToolCallFormat) -> ToolCallFormat:
    """Return the format of a name.

    Args:
        given: One of `TOOL_CALL_FORMATS`, the import path of a function, or a function.

    Raises:
        ValueError: There is none of that name.
    """
    if not isinstance(given, str):
        return given
    built_in = TOOL_CALL_FORMATS.get(given)
    return built_in or import_function("format of tool calls", given, TOOL_CALL_FORMATS)


def detect_format(chat_template: str) -> str | None:
    """Return the format in which a chat template writes calls; None: in none that is known.

    The template renders a call, and the format is the first that reads it back.

    Args:
        chat_template: The text of a Jinja template.
    """
    turns = [
        _rendered(chat_template, content, arguments)
        # templates differ in what they take; content of None is for older DeepSeek templates
        for content in ("", None)
        for arguments in (_PROBE.arguments, json.dumps(_PROBE.arguments))
    ]
    for name, read in TOOL_CALL_FORMATS.items():
        if any(list(read(turn)) == [_PROBE] for turn in turns):
            return name
    return None


_PROBE = ToolCall("look_up", {"word": "lantern"})
_PROBE_SCHEMA = {
    "type": "function",
    "function": {
        "name": _PROBE.name,
        "description": "Looks up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}


def _rendered(template: str, content: str | None, arguments: Any) -> str:
    """Return how a template writes a turn that is a call, or nothing if it cannot."""
    question = {"role": "user", "content": "What does it mean?"}
    function = {"name": _PROBE.name, "arguments": arguments}
    # nine letters and digits, as Mistral's templates demand
    call = {"type": "function", "id": "lookup001", "function": function}
    answer = {"role": "assistant", "content": content, "tool_calls": [call]}
    options: dict[str, Any] = {
        **{"chat_template": template, "tools": [_PROBE_SCHEMA]},
        **{"bos_token": "", "eos_token": "", "pad_token": "", "unk_token": ""},
    }
    # annotated as if it returned a text
    render: Any = render_jinja_template
    try:
        (text,), _ = render([[question, answer]], **options)
        (prompt,), _ = render([[question]], add_generation_prompt=True, **options)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return ""
    if text.startswith(prompt):
        return str(text).removeprefix(prompt)
    return str(text).rpartition(question["content"])[2]
