"""Messages in the form that a chat template reads.

Templates differ in what they take for a turn's content, text or a list of parts, and for the
arguments of a call, an object or its JSON. What they were not written for they print as Python
would, or leave out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from jinja2 import TemplateSyntaxError, meta, nodes

from lrlhf.bounded_templates import BoundedEnvironment, render_jinja_template
from lrlhf.types import Message

_MARKS: Final = ("lantern", "umbrella")
_QUOTED: Final = ("'text'", '"text"')
"""What Python and JSON write for a part, beside its text."""
_CALLED: Final = "kettle"
_QUESTION: Final = {"role": "user", "content": "?"}
_CALL: Final = {
    "id": "lookup001",  # nine letters and digits, as Mistral's templates demand
    "type": "function",
    "function": {"name": _CALLED, "arguments": {}},
}


def text_of_parts(content: object) -> str | None:
    """Return the text of content that consists of text parts; None: it does not."""
    if not isinstance(content, list | tuple):
        return None
    texts = [
        part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        for part in content
    ]
    return "".join(map(str, texts)) if None not in texts else None


def readable_messages(messages: Sequence[Message], template: str) -> list[dict[str, Any]]:
    """Return messages as a template reads them.

    Text parts become text, and text a part, where the template reads only that in a turn of this
    role. Arguments of calls are objects which are JSON where the template prints them.

    Args:
        messages: Chat turns, the arguments of their calls objects.
        template: Text of the template.

    Raises:
        ValueError: A turn has parts that are no text, and the template takes no parts.
    """
    return [_readable(message, template) for message in messages]


def _readable(message: Message, template: str) -> dict[str, Any]:
    readable = dict(message)
    content, role = message.get("content"), str(message["role"])
    if content:
        takes_text, takes_parts = _accepts(template, role)
        text = text_of_parts(content)
        if isinstance(content, str) and takes_parts and not takes_text:
            readable["content"] = [{"type": "text", "text": content}]
        elif text is not None and not takes_parts:
            readable["content"] = text
        elif text is None and isinstance(content, list) and takes_text and not takes_parts:
            kinds = sorted({str(part.get("type")) for part in content})
            raise ValueError(
                f"it takes the content of role {role!r} as text, not as parts ({', '.join(kinds)})"
            )
    if calls := message.get("tool_calls"):
        readable["tool_calls"] = [_with_arguments(call) for call in calls]
        if not content:
            empty = readable.pop("content", None)
            readable |= _empty_content(template, absent=empty is None)
    return readable


class _Arguments(dict[str, Any]):
    """Arguments of a call, of which a template that prints or joins them gets JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return f"{self}{text}"

    def __radd__(self, text: str) -> str:
        return f"{text}{self}"


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(call)
    if isinstance(call.get("function"), Mapping):
        changed["function"] = _with_arguments(call["function"])
    elif isinstance(call.get("arguments"), dict):
        changed["arguments"] = _Arguments(call["arguments"])
    return changed


@lru_cache(maxsize=256)
def _empty_content(template: str, *, absent: bool) -> Mapping[str, str | None]:
    """Return the content of a turn that says nothing and calls, so that a template reads the call.

    Some want null, others empty text or no key at all.
    """
    forms: list[dict[str, str | None]] = [{}, {"content": ""}]
    forms = [*(forms if absent else reversed(forms)), {"content": None}]
    calls = {"role": "assistant", "tool_calls": [_with_arguments(_CALL)]}
    for form in forms:
        text = _tried(template, {**calls, **form}, [_QUESTION])
        if _CALLED in text and "None" not in text:
            return form
    return forms[0]


@lru_cache(maxsize=256)
def _accepts(template: str, role: str) -> tuple[bool, bool]:
    """Try whether a template renders content of a role that is text, and that is text parts."""
    text = "".join(_MARKS)
    as_text = _rendered(template, role, text)
    as_parts = _rendered(template, role, [{"type": "text", "text": mark} for mark in _MARKS])
    printed = any(as_parts.count(sign) > as_text.count(sign) for sign in _QUOTED)
    return text in as_text, all(mark in as_parts for mark in _MARKS) and not printed


def _rendered(template: str, role: str, content: Any) -> str:
    turn = {"role": role, "content": content}
    if role == "tool":
        called = {"role": "assistant", "content": "", "tool_calls": [_with_arguments(_CALL)]}
        turn |= {"name": _CALLED, "tool_call_id": _CALL["id"]}
        return _tried(template, turn, [_QUESTION, called])
    if role in ("system", "developer"):
        return _tried(template, turn, [], [_QUESTION])
    return _tried(template, turn, [] if role == "user" else [_QUESTION])


def _tried(
    template: str,
    turn: Mapping[str, Any],
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Render a turn among others; empty text: the template does not take it."""
    # annotated as if it returned a text
    render: Any = render_jinja_template
    tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
    try:
        (text,), _ = render([[*before, turn, *after]], chat_template=template, **tokens)
    # whatever a template does with what it was not written for
    except Exception:  # noqa: BLE001
        return ""
    return str(text)


GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Begins what the assistant writes, as `transformers` knows it."""

_TAGS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
_WRITTEN = (nodes.Output, nodes.Concat, nodes.Add, nodes.CondExpr)
"""Nodes whose constants are what a template writes, not what it looks for."""

_LOOKING = (nodes.Compare, nodes.Getitem, nodes.Filter, nodes.Test)


class TemplateConstants(NamedTuple):
    """Texts in the expressions of a chat template."""

    roles: frozenset[str] = frozenset()
    """What it compares roles with, or has a table for."""
    marks: tuple[str, ...] = ()
    """What it looks for in texts, such as ``</think>``; words and white space alone are none."""
    variables: frozenset[str] = frozenset()
    """What it reads beside the turns, such as ``enable_thinking``."""


@lru_cache(maxsize=32)
def template_constants(template: str) -> TemplateConstants:
    """Find the constants of a template; none where it cannot be parsed, as rendering will tell."""
    # which computes no constants of any size
    environment = BoundedEnvironment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)
    try:
        tree = environment.parse(_TAGS.sub("", template))
    except TemplateSyntaxError:
        return TemplateConstants()
    roles = {
        text
        for node in tree.find_all(_LOOKING)
        if any(map(_names_role, node.find_all(nodes.Node)))
        for text in _texts(node.find_all(nodes.Const))
    }
    tables = {text for pair in tree.find_all(nodes.Pair) for text in _texts([pair.key])}
    sought = {
        text
        for node in tree.find_all(nodes.Node)
        if not isinstance(node, _WRITTEN)
        and not (isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name))
        for text in _texts(node.iter_child_nodes())
        if len(text.strip()) > 1 and re.search(r"[^\w\s]", text)
    }
    return TemplateConstants(
        frozenset(roles | tables),
        tuple(sorted(sought, key=len, reverse=True)),
        frozenset(meta.find_undeclared_variables(tree)),
    )


def _texts(children: Iterable[nodes.Node]) -> list[str]:
    return [
        child.value
        for child in children
        if isinstance(child, nodes.Const) and isinstance(child.value, str)
    ]


def _names_role(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Name):
        return "role" in node.name
    return "role" in (getattr(node, "attr", ""), getattr(node, "value", ""))
