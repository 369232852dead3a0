"""The calls of tools in what a policy writes, in the formats that models are trained on.

A format is a function from the text of one turn to the calls in it, in their order. It never
raises: what is meant as a call and cannot be read is a `MalformedCall`, with the problem for the
policy to read. Its time is proportional to the length of the text: after 32 calls that cannot be
read, the remaining text belongs to the last of them.

The text may hold special tokens or not, with two exceptions: Mistral's call ids and the tokens of
DeepSeek cannot be distinguished from names once they are stripped. What precedes a ``</think>`` is
reasoning, in which there are no calls, unless the mark stands in an argument. A turn that ends
inside a call has a malformed one. Code fences have no meaning: a call inside one is a call.

From top to bottom: the types, the formats, their names and how they are detected, a turn as a
message of a chat, the scan that all formats share, and the syntax of each.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import regex
from jinja2 import TemplateError

from lrlhf.bounded_templates import render_jinja_template
from lrlhf.functional.names import import_function
from lrlhf.types import Message


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in a turn of the policy."""

    name: str
    arguments: Mapping[str, Any]
    """Values as JSON has them; only texts, if the format has nothing else."""
    start: int | None = field(default=None, compare=False)
    """Where it begins in the text of the turn; None: unknown."""
    end: int | None = field(default=None, compare=False)
    """Where it ends, together with others of the same list."""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A part of a turn that was meant as a call and cannot be read."""

    text: str
    problem: str
    """What is wrong with it, for the policy."""


ToolCallFormat = Callable[[str], Sequence[ToolCall | MalformedCall]]
"""Finds the calls in the text of one turn."""


def hermes(text: str) -> list[ToolCall | MalformedCall]:
    """Read ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number of them.

    Written by Qwen 2.5 and Qwen 3, Hermes 2 Pro and later, SmolLM3 and Granite 4.

    Reference:
        https://qwen.readthedocs.io/en/latest/framework/function_call.html and
        https://huggingface.co/NousResearch/Hermes-2-Pro-Llama-3-8B
    """
    return _calls_in(text, _HERMES, _hermes_call)


def qwen3_coder(text: str) -> list[ToolCall | MalformedCall]:
    r"""Read calls in tags, whose values are texts, without the line breaks around them.

    ``<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>``;
    the outer tag may be missing. Written by Qwen3-Coder, Qwen 3.5 and Nemotron 3.

    Reference:
        Chat template of https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct
    """
    return _calls_in(text, _QWEN_CODER, _qwen_coder_call)


def mistral(text: str) -> list[ToolCall | MalformedCall]:
    """Read ``[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`` or ``[TOOL_CALLS]NAME{…}``.

    The first is what Mistral models up to tokenizer v7 write, the second those from v11 on, also
    with ``[ARGS]`` before the arguments and a ``[CALL_ID]``. Without the token, a call must begin
    the text.

    Reference:
        https://docs.mistral.ai/capabilities/function_calling and, for the tokens,
        https://github.com/mistralai/mistral-common
    """
    return _calls_in(text, _MISTRAL, _mistral_calls)


def deepseek(text: str) -> list[ToolCall | MalformedCall]:
    r"""Read calls between DeepSeek's own tokens, of V3 and R1 or of V3.1.

    ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{…}\n```<｜tool▁call▁end｜>``, or
    ``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>``.

    Reference:
        Chat template of https://huggingface.co/deepseek-ai/DeepSeek-V3-0324, and "ToolCall" of
        https://huggingface.co/deepseek-ai/DeepSeek-V3.1
    """
    return _calls_in(text, _DEEPSEEK, _deepseek_call)


def python(text: str) -> list[ToolCall | MalformedCall]:
    """Read a list of calls in Python, ``[NAME(key="value", other=1), …]``; nothing is evaluated.

    The list is the whole turn, or stands between ``<|tool_call_start|>`` and
    ``<|tool_call_end|>`` or between ``<|python_start|>`` and ``<|python_end|>``. Values are
    literals, of Python or of JSON. Written by Llama 3.2 and 3.3 without tools in their chat
    template, Llama 4 and LFM2.

    Reference:
        https://github.com/meta-llama/llama-models/blob/main/models/llama3_2/text_prompt_format.md
        and https://huggingface.co/LiquidAI/LFM2-1.2B
    """
    return _calls_in(text, _PYTHON, _python_calls)


def llama3_json(text: str) -> list[ToolCall | MalformedCall]:
    """Read objects ``{"name": …, "parameters": {…}}`` wherever they stand in the text.

    Several are separated by ``;`` or by text; ``<|python_tag|>`` may precede them, and nothing but
    them follows it. Other objects in the text are no calls. Written by Llama 3.1, 3.2 and 3.3;
    ``arguments`` in the place of ``parameters`` is read too.

    Reference:
        "JSON based tool calling" of
        https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/
    """
    return _calls_in(text, _LLAMA_JSON, _llama_json_call)


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


def tool_call_format(name: str | ToolCallFormat) -> ToolCallFormat:
    """Return the format of a name.

    Args:
        name: One of `TOOL_CALL_FORMATS`, the import path of a function, or a function.

    Raises:
        ValueError: There is none of that name.
    """
    if not isinstance(name, str):
        return name
    built_in = TOOL_CALL_FORMATS.get(name)
    return built_in or import_function("format of tool calls", name, TOOL_CALL_FORMATS)


def detect_format(chat_template: str) -> str | None:
    """Return the format in which a chat template writes calls; None: it is unknown.

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


_SPECIAL = re.compile(r"<[|\uff5c][^<>\s]*[|\uff5c]>|</?s>|\[/?[A-Z_]+\]")
"""What special tokens look like."""


def turn_message(
    text: str, raw: str, read_calls: ToolCallFormat | None, ids: Iterator[str]
) -> Message:
    """Return a turn of the policy as a message of a chat, with its calls apart from its content.

    Args:
        text: Without special tokens; all of it is content if a call cannot be read.
        raw: With special tokens, which mark the calls of some models.
        read_calls: Finds calls; None: there is nothing to call.
        ids: Of the calls.
    """
    attempts = read_calls(raw) if read_calls is not None else ()
    calls = [call for call in attempts if isinstance(call, ToolCall)]
    if read_calls is None or not calls or len(calls) < len(attempts):
        return {"role": "assistant", "content": text}
    content = content_outside_calls(calls, text, raw, read_calls)
    return {
        "role": "assistant",
        "content": text if content is None else content,
        "tool_calls": [{"id": next(ids), **chat_call(call)} for call in calls],
    }


def chat_call(call: ToolCall) -> Mapping[str, Any]:
    """Return a call as chat templates take it."""
    return {
        "type": "function",
        "function": {"name": call.name, "arguments": dict(call.arguments)},
    }


def call_ids() -> Iterator[str]:
    """Go through ids of nine letters and digits, as Mistral's chat templates demand."""
    return (f"call{number % 100_000:05d}" for number in itertools.count(1))


def content_outside_calls(
    attempts: Sequence[ToolCall | MalformedCall], text: str, raw: str, read_calls: ToolCallFormat
) -> str | None:
    """Return a turn without the calls that can be read.

    Args:
        attempts: The calls in ``raw``.
        text: Without special tokens.
        raw: With special tokens.
        read_calls: Finds calls.

    Returns:
        None: the format does not locate its calls.
    """
    calls = [call for call in attempts if isinstance(call, ToolCall)]
    in_text = [call for call in read_calls(text) if isinstance(call, ToolCall)]
    if in_text == calls:
        calls, raw = in_text, text
    # else special tokens mark the calls. Which letters of `raw` are those of `text`?
    shared: list[bool] = []
    position = 0
    while len(shared) < len(raw):
        special = _SPECIAL.match(raw, len(shared))
        if special and not text.startswith(special[0], position):
            shared += [False] * len(special[0])
            continue
        same = text[position : position + 1] == raw[len(shared)]
        shared.append(same)
        position += same
    for call in calls:
        if call.start is None or call.end is None:
            return None
        shared[call.start : call.end] = [False] * (call.end - call.start)
    return "".join(itertools.compress(raw, shared)).strip()


class _MalformedError(Exception):
    """A call cannot be read.

    Args:
        problem: Why, for the policy.
        reached: Where the text stops being a call; None: soon.
    """

    def __init__(self, problem: str, reached: int | None = None) -> None:
        super().__init__(problem)
        self.reached = reached


class _ParsedCalls(NamedTuple):
    """The calls that were read at one position."""

    calls: list[ToolCall]
    end: int
    """Where the text goes on."""


class _Format(NamedTuple):
    """Where calls begin, and where the text goes on after one that cannot be read."""

    opening: re.Pattern[str]
    resume: re.Pattern[str]
    """The end of a call, or the place where the next one begins."""
    head: regex.Pattern[str]
    """What a call begins with; a text that ends in it has begun one."""


_MOST_MALFORMED = 32
"""Of one turn: an error of Python's JSON takes a time that grows with the text before it."""
_LEAST_BEGUN = 2
"""Letters of a call's beginning that are no accident at the end of a turn."""
_THINK, _THINK_END = "<think>", "</think>"
_MARK = re.compile(f"{_THINK}|{_THINK_END}")
_ENDINGS = re.compile(r"(?:\s|<[|\uff5c](?!tool)[^<>\s]*[|\uff5c]>|</s>)*\Z")
"""Special tokens that end a turn, and not those that begin a call."""


class _Scan:
    """Reads all calls of a turn from the left.

    Marks of thoughts inside a call are a part of it.

    Args:
        turn: Reasoning included.
        form: Of the calls.
        read: Reads what begins at a match of ``form.opening``; raises `_MalformedError`.
    """

    def __init__(
        self, turn: str, form: _Format, read: Callable[[str, re.Match[str]], _ParsedCalls]
    ) -> None:
        self._form, self._read = form, read
        self._text, self._position = turn, 0
        self._offset = 0
        """Letters of the turn before the text."""
        self._has_thought = False
        self._malformed = 0
        self.calls: list[ToolCall | MalformedCall] = []

    def run(self) -> None:
        """Find all calls."""
        if self._text.lstrip().startswith(_THINK):
            if _THINK_END not in self._text:
                return  # the thought lasts to the end
            self._thought_until(self._text.index(_THINK_END))
        opening, mark = self._searched()
        while opening or mark:
            if mark and not (opening and opening.start() < mark.start()):
                if not self._thought(mark):
                    return
            elif opening:
                self._call(opening)
            opening, mark = self._searched(opening, mark)
        self._begun()

    def _searched(
        self, opening: re.Match[str] | None = None, mark: re.Match[str] | None = None
    ) -> tuple[re.Match[str] | None, re.Match[str] | None]:
        """Return the next beginning of a call and the next mark, again if they are still ahead."""

        def next_of(pattern: re.Pattern[str], known: re.Match[str] | None) -> re.Match[str] | None:
            if known and known.string is self._text and known.start() >= self._position:
                return known
            return pattern.search(self._text, self._position)

        return next_of(self._form.opening, opening), next_of(_MARK, mark)

    def _thought_until(self, end: int) -> None:
        """Take all that precedes a mark for a thought, in which there are no calls."""
        self._offset += end + len(_THINK_END)
        self._text, self._position = self._text[end + len(_THINK_END) :], 0
        self._has_thought, self._malformed = True, 0
        self.calls.clear()

    def _thought(self, mark: re.Match[str]) -> bool:
        """Pass a mark of a thought; return whether the turn goes on behind it."""
        if mark.group() == _THINK_END and not self._has_thought:
            self._thought_until(mark.start())  # the chat template may have opened it
            return True
        self._position = mark.end()
        if mark.group() == _THINK_END:
            return True
        self._has_thought = True
        end = self._text.find(_THINK_END, self._position)
        if end >= 0:
            self._position = end + len(_THINK_END)
            return True
        if lost := self._form.opening.search(self._text, self._position):
            text = self._text[lost.start() :].strip()
            problem = f"the call stands in a thought that no {_THINK_END} closes"
            self.calls.append(MalformedCall(text, problem))
        return False

    def _call(self, opening: re.Match[str]) -> None:
        text = self._text
        try:
            calls, self._position = self._read(text, opening)
            start, end = self._offset + opening.start(), self._offset + self._position
            self.calls += [replace(call, start=start, end=end) for call in calls]
            return
        except _MalformedError as error:
            problem, reached = str(error), error.reached or opening.end()
        self._malformed += 1
        resume = self._form.resume.search(text, opening.end())
        self._position = resume.end() if resume and self._malformed < _MOST_MALFORMED else len(text)
        end = -1 if self._has_thought else text.find(_THINK_END, reached, self._position)
        if end >= 0:
            self._thought_until(end)
            return
        self.calls.append(MalformedCall(text[opening.start() : self._position].strip(), problem))

    def _begun(self) -> None:
        """Find a call at the end of whose beginning the turn ends."""
        ending = _ENDINGS.search(self._text, self._position)
        text = self._text[: ending.start()] if ending else self._text
        begun = self._form.head.search(text, self._position, partial=True)
        if begun and begun.partial and len(begun.group()) >= _LEAST_BEGUN:
            self.calls.append(
                MalformedCall(begun.group().strip(), "the call ends in its beginning")
            )


def _calls_in(
    turn: str, form: _Format, read: Callable[[str, re.Match[str]], _ParsedCalls]
) -> list[ToolCall | MalformedCall]:
    scan = _Scan(turn, form, read)
    scan.run()
    return scan.calls


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number of JSON")
    return value


STRICT_JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
"""Reads JSON without the ``NaN`` and ``Infinity`` that Python adds to it."""
_MAX_DEPTH = 64
"""Of nested arguments: what writes them down again later must not run out of stack."""
_SPACE = re.compile(r"\s*")


def _json_at(text: str, position: int) -> tuple[Any, int]:
    """Read the JSON value at a position; white space may precede it."""
    start = _skip_space(text, position)
    try:
        return STRICT_JSON.raw_decode(text, start)
    except json.JSONDecodeError as error:
        where = error.pos - start + 1
        open_string = error.msg.startswith("Unterminated string")
        reached = len(text) if open_string else error.pos
        raise _MalformedError(f"not JSON: {error.msg} (character {where})", reached) from None
    except RecursionError:
        raise _MalformedError("the JSON is nested too deeply") from None
    except ValueError as error:
        raise _MalformedError(f"not JSON: {error}") from None


def _skip_space(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    assert space  # it matches nothing too
    return space.end()


def _expect(text: str, position: int, literal: str) -> int:
    start = _skip_space(text, position)
    if not text.startswith(literal, start):
        raise _MalformedError(f"no {literal} where the call should end", start)
    return start + len(literal)


def _call_of(value: Any, end: int) -> ToolCall:
    """Return the call that a JSON object describes, which ends there."""
    if not isinstance(value, dict):
        raise _MalformedError('not an object {"name": …, "arguments": {…}}', end)
    return _checked(value.get("name"), value.get("arguments", value.get("parameters", {})), end)


def _checked(name: Any, arguments: Any, end: int) -> ToolCall:
    """Return a call, which ends there, whose arguments any JSON can hold, as UTF-8."""
    if not isinstance(name, str) or not name:
        raise _MalformedError("the call has no name", end)
    if not isinstance(arguments, dict):
        raise _MalformedError(f"the arguments of {name} are no object", end)
    if _is_deep(arguments):
        raise _MalformedError(f"the arguments of {name} are nested too deeply", end)
    try:
        written = json.dumps([name, arguments], ensure_ascii=False, allow_nan=False)
        written.encode()
    except (TypeError, ValueError) as error:
        raise _MalformedError(f"the call of {name!a} is no JSON: {error}", end) from None
    # tuples and keys of other types become what JSON makes of them
    return ToolCall(name, json.loads(written)[1])


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        lists = [list(each.values()) if isinstance(each, dict) else each for each in level]
        level = [inner for each in lists if isinstance(each, list | tuple) for inner in each]
        if not level:
            return False
    return True


_HERMES = _Format(
    re.compile("<tool_call>"),
    re.compile("</tool_call>|(?=<tool_call>)"),
    regex.compile("<tool_call>"),
)


def _hermes_call(text: str, opening: re.Match[str]) -> _ParsedCalls:
    value, end = _json_at(text, opening.end())
    end = _expect(text, end, "</tool_call>")
    return _ParsedCalls([_call_of(value, end)], end)


_QWEN_CODER = _Format(
    re.compile(r"(?:<tool_call>\s*)?<function=|<tool_call>"),
    re.compile(r"</function>(?:\s*</tool_call>)?|</tool_call>|(?=<tool_call>|<function=)"),
    regex.compile("<tool_call>|<function="),
)
_QWEN_CODER_END = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
_QWEN_CODER_NAME = re.compile(r"([^<>\n]+)>")
_QWEN_CODER_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?")
_QWEN_CODER_VALUE_END = re.compile(r"\n?</parameter>|<function=")


def _qwen_coder_call(text: str, opening: re.Match[str]) -> _ParsedCalls:
    name = _QWEN_CODER_NAME.match(text, opening.end())
    if not name or not opening.group().endswith("="):
        raise _MalformedError("no <function=NAME> where the call begins")
    arguments, end = {}, name.end()
    while key := _QWEN_CODER_PARAMETER.match(text, end):
        value_end = _QWEN_CODER_VALUE_END.search(text, key.end())
        if not value_end or not value_end.group().endswith("</parameter>"):
            reached = len(text) if value_end is None else value_end.start()
            what = f"no </parameter> after the value of {key[1].strip()}"
            raise _MalformedError(what, reached)
        arguments[key[1].strip()] = text[key.end() : value_end.start()]
        end = value_end.end()
    close = _QWEN_CODER_END.match(text, end)
    if not close:
        raise _MalformedError("no </function> where the call should end", end)
    return _ParsedCalls([_checked(name[1].strip(), arguments, close.end())], close.end())


_MISTRAL_NAMED = r"[^\W\d][\w.-]*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?(?=\{)"
_MISTRAL = _Format(
    re.compile(
        r"\[TOOL_CALLS\]|\A\s*(?=\[\s*\{\s*\"(?:name|arguments|id)\"\s*:"
        rf"|{_MISTRAL_NAMED}\{{\s*[\"}}])"
    ),
    re.compile(r"(?=\[TOOL_CALLS\])"),
    regex.compile(r"\[TOOL_CALLS\]|\A\s*\[\s*\{\s*\"(?:name|arguments|id)\"\s*:"),
)
_MISTRAL_CALL = re.compile(rf"\s*({_MISTRAL_NAMED})")


def _mistral_calls(text: str, opening: re.Match[str]) -> _ParsedCalls:
    start = _skip_space(text, opening.end())
    if text.startswith(("[", "{"), start):
        values, end = _json_at(text, start)
        if not isinstance(values, list):
            raise _MalformedError("not a list of calls", end)
        return _ParsedCalls([_call_of(value, end) for value in values], end)
    calls: list[ToolCall] = []
    end = start
    while head := _MISTRAL_CALL.match(text, end):
        arguments, end = _json_at(text, head.end())
        calls.append(_checked(head[1].partition("[")[0], arguments, end))
    if not calls:
        raise _MalformedError("neither a list of calls nor NAME{…} after [TOOL_CALLS]")
    return _ParsedCalls(calls, end)


_DEEPSEEK = _Format(
    re.compile("<｜tool▁call▁begin｜>"),
    re.compile("<｜tool▁call▁end｜>|(?=<｜tool▁call▁begin｜>)"),
    regex.compile("(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>"),
)
_DEEPSEEK_HEAD = re.compile(r"([^<\n]*)<｜tool▁sep｜>(?:([^\n{<]+)\n```json\n)?")


def _deepseek_call(text: str, opening: re.Match[str]) -> _ParsedCalls:
    head = _DEEPSEEK_HEAD.match(text, opening.end())
    if not head:
        raise _MalformedError("no <｜tool▁sep｜> in the call")
    arguments, end = _json_at(text, head.end())
    if head[2]:
        end = _expect(text, end, "```")
    end = _expect(text, end, "<｜tool▁call▁end｜>")
    return _ParsedCalls([_checked((head[2] or head[1]).strip(), arguments, end)], end)


_PYTHON = _Format(
    re.compile(
        r"\A\s*(?:<\|[a-z_]+\|>\s*)*(?=\[\s*[^\W\d]\w*\()"
        r"|<\|tool_call_start\|>|<\|python_start\|>"
    ),
    re.compile(r"<\|[a-z_]+\|>|</s>"),
    regex.compile(
        r"\A\s*(?:<\|[a-z_]+\|>\s*)*\[\s*[^\W\d]\w*\("
        r"|<\|tool_call_start\|>|<\|python_start\|>"
    ),
)
_PYTHON_PIECE = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?P<open>["'])|<\|[a-z_]+\|>|</s>""",
    re.DOTALL,
)
"""What a list of calls may hold that its end is looked for behind, and what may end it."""


def _python_calls(text: str, opening: re.Match[str]) -> _ParsedCalls:
    reached, close = opening.end(), None
    for close in _PYTHON_PIECE.finditer(text, opening.end()):
        if close["string"] is None:
            break
        reached, close = close.end(), None
    if close and close["open"]:  # a string without its end goes on to that of the text
        reached, close = len(text), _PYTHON.resume.search(text, close.end())
    body = text[opening.end() : close.start() if close else len(text)].strip()
    try:
        with warnings.catch_warnings():
            # of escapes that Python does not know
            warnings.simplefilter("ignore")
            values = ast.parse(body, mode="eval").body
        if not isinstance(values, ast.List):
            raise _MalformedError("not a list of calls, [NAME(key=value), …]", reached)
        calls = [_python_call(value, reached) for value in values.elts]
    except SyntaxError as error:
        raise _MalformedError(f"not a list of calls in Python: {error.msg}", reached) from None
    except ValueError as error:
        raise _MalformedError(f"not a list of calls in Python: {error}", reached) from None
    except (RecursionError, MemoryError):
        raise _MalformedError("the calls are nested too deeply", reached) from None
    return _ParsedCalls(calls, close.end() if close else len(text))


def _python_call(node: ast.expr, reached: int) -> ToolCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise _MalformedError("not a list of calls, [NAME(key=value), …]", reached)
    name = node.func.id
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise _MalformedError(
                f"{name} must be given each argument once and by its name", reached
            )
        try:
            arguments[keyword.arg] = ast.literal_eval(_JSONWords().visit(keyword.value))
        except (ValueError, TypeError):
            raise _MalformedError(f"the value of {keyword.arg} is no literal", reached) from None
    if node.args:
        raise _MalformedError(
            f"{name} must be given its arguments by name, {name}(key=value)", reached
        )
    return _checked(name, arguments, reached)


class _JSONWords(ast.NodeTransformer):
    """Turns the words of JSON that Python takes for variables into their values."""

    _VALUES: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._VALUES[node.id]) if node.id in self._VALUES else node


_LLAMA_OBJECT = (
    r"(?=\{\s*(?:\"type\"\s*:\s*\"function\"\s*,\s*)?"
    r"(?:\"name\"\s*:\s*\"[^\"\\]*\"\s*,\s*)?\"(?:parameters|arguments)\"\s*:)"
)
_LLAMA_NEARLY = (
    r"(?=\{\s*['\"]?name['\"]?\s*:?\s*['\"][\w.-]+['\"]\s*,?\s*"
    r"['\"]?(?:parameters|arguments)['\"]?\s*:?\s*\{)"
)
"""With another quotation mark, or without a colon or a comma."""
_LLAMA_JSON = _Format(
    re.compile(rf"<\|python_tag\|>\s*|{_LLAMA_OBJECT}|{_LLAMA_NEARLY}"),
    re.compile(r"(?=<\|[a-z_]+\|>)|\Z"),
    regex.compile(
        r"<\|python_tag\|>|\{\s*(?:\"type\"\s*:\s*\"function\"\s*,\s*)?"
        r"(?:\"name\"\s*:\s*\"[^\"\\]*\"\s*,\s*)?\"(?:parameters|arguments)\"\s*:"
    ),
)


def _llama_json_call(text: str, opening: re.Match[str]) -> _ParsedCalls:
    value, end = _json_at(text, opening.end())
    return _ParsedCalls([_call_of(value, end)], end)
