"""Chat turns: reading them from rows, and rendering them with the tokenizer's template."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from lrlhf.bounded_templates import render_jinja_template
from lrlhf.datamodules.loading.plain_rows import read_structure, read_turns
from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.rows.bad_rows import BadRow, nearest
from lrlhf.datamodules.rows.columns import is_empty, shown, structure_of, valid_text, wrong_type
from lrlhf.models import readers_of, rejoined, special_tokens, split_messages, split_text
from lrlhf.models.chat_templates import (
    GENERATION,
    TemplateConstants,
    readable_messages,
    template_constants,
)
from lrlhf.rewards.function import content_text
from lrlhf.types import Message

Turns = tuple[Message, ...]
Span = tuple[int, int]
"""First character, and the one behind the last."""

_ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "tool_response": "tool",
}
"""Other words for the roles of chat templates, in lower case."""
_TEMPLATE_ROLES = {
    "system": ("system", "developer"),
    "developer": ("system",),
    "user": ("user",),
    "assistant": ("assistant",),
    "tool": ("tool", "ipython", "observation", "function"),
}
"""What a template that has no case for a role may call it; the first, where it has none for these
either."""
_CALL_ROLES = {"function_call", "tool_call"}
"""Roles of turns whose content is a call of the assistant, as JSON."""
SYSTEM_ROLES = ("system", "developer")
SYSTEM_COLUMNS = ("system", "system_prompt")
"""Columns that may hold the system turn of a row's chat."""
LOSS_MARKS = ("weight", "train", "trainable", "loss_mask", "loss")
"""Keys by which a turn says whether it is to be learnt."""
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking", "thoughts", "thought")
"""Keys of a turn in which templates look for what the assistant thought before it."""


def read_messages(value: object, column: str) -> tuple[Message, ...]:
    """Read chat turns, written as ``role``/``content`` or as ``from``/``value``.

    Text parts of contents become ``{"type": "text", "text": …}``, and arguments of calls objects.

    Raises:
        BadRow: It is no list of turns, a turn has no role, or no turn has content.
    """
    value = read_turns(value, column)
    if isinstance(value, Mapping) and value and all(isinstance(v, list) for v in value.values()):
        # a list of structs as some versions of `datasets` keep it: a list for each key
        if len({len(entries) for entries in value.values()}) > 1:
            raise wrong_type(column, "lists of the same length, an entry for each turn", value)
        value = [dict(zip(value, turn, strict=True)) for turn in zip(*value.values(), strict=True)]
    if not isinstance(value, list | tuple):
        raise wrong_type(column, "a list of messages", value)
    if not value:
        raise BadRow("empty text", f"column {column!r} is an empty list of messages")
    messages = tuple(_read_message(entry, column) for entry in value)
    if not any(message.get("content") or message.get("tool_calls") for message in messages):
        raise BadRow("empty text", f"no message of column {column!r} has content")
    return messages


def _read_message(entry: object, column: str) -> Message:
    if not isinstance(entry, Mapping):
        raise wrong_type(column, "a list of messages, each with role and content", entry)
    # tables fill what some messages lack with None; templates test for presence
    message = {key: value for key, value in entry.items() if value is not None}
    if "from" in message and "role" not in message:
        message["role"] = message.pop("from")
        if "value" in message:
            message["content"] = message.pop("value")
    role = message.get("role")
    if not isinstance(role, str):
        raise BadRow(
            "wrong type", f"a message of column {column!r} has no role: {dict(entry)!r:.80}"
        )
    message = _with_calls({**message, "role": usual_role(role)}, role, column)
    if not isinstance(message.get("content", ""), str | list):
        raise wrong_type(f"{column}.content", "text", message["content"])
    if isinstance(message.get("content"), list):
        message["content"] = [_part(part, column) for part in message["content"]]
    if "content" not in message and "tool_calls" not in message:
        raise BadRow("empty text", f"a message of column {column!r} has no content")
    return message


def _with_calls(message: dict[str, Any], role: str, column: str) -> dict[str, Any]:
    """Read the calls of a turn: its own, OpenAI's older form, or a turn that is nothing else."""
    if role in _CALL_ROLES and "tool_calls" not in message:
        message |= {"role": "assistant", "tool_calls": _calls_of(message.pop("content", None))}
    if call := message.pop("function_call", None):  # empty where a table has one for every turn
        message.setdefault("tool_calls", [{"type": "function", "function": call}])
    if calls := _calls(message.pop("tool_calls", []), column):
        message["tool_calls"] = calls
    return message


@lru_cache(maxsize=256)
def usual_role(role: str) -> str:
    """Return the usual word for a role; one that is not known as it is."""
    word = role.strip().lower()
    word = _ROLES.get(word, word)
    return word if word in _TEMPLATE_ROLES else role


def _calls_of(content: object) -> list[dict[str, Any]]:
    """Read the calls of a turn that is nothing else: JSON of one, or of a list of them."""
    structure = structure_of({"function_call": content}, "function_call", object)
    calls: list[dict[str, Any]] = []
    for call in structure if isinstance(structure, list) else [structure]:
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise wrong_type("function_call", "a call with its name and arguments", call)
        calls.append({"type": "function", "function": call})
    return calls


def with_system(
    messages: tuple[Message, ...], row: Row, default: str | None = None
) -> tuple[Message, ...]:
    """Put the system turn that a row has as a column, else the ``default``, before its turns.

    Turns that begin with a system turn keep it.

    Raises:
        BadRow: The row has several, which are not the same.
    """
    columns = [name for name in SYSTEM_COLUMNS if isinstance(row.get(name), str)]
    texts = {row[name].strip(): row[name] for name in columns if not is_empty(row[name].strip())}
    if messages and messages[0]["role"] in SYSTEM_ROLES:
        own = content_text(messages[0].get("content"))
        texts[own.strip()] = default = own
    if len(texts) > 1:
        raise BadRow(
            "several system turns",
            f"its column {' and its column '.join(map(repr, columns))} and its turns do not say "
            f"the same: {' | '.join(map(shown, texts))}",
            remedy="keep one of them, or rename a column that is no system turn",
        )
    text = next(iter(texts.values()), default)
    if text is None or (messages and messages[0]["role"] in SYSTEM_ROLES):
        return messages
    return ({"role": "system", "content": text}, *messages)


def read_tools(row: Row) -> list[dict[str, Any]]:
    """Read the descriptions of tools that a row has.

    Raises:
        BadRow: They are none.
    """
    return [_tool(tool) for tool in structure_of(row, "tools", list) or []]


def _tool(value: object) -> dict[str, Any]:
    """Read a description of a tool, or that with JSON text for a schema in it."""
    tool = structure_of({"tools": value}, "tools", dict)
    if not tool:
        raise wrong_type("tools", "a list of descriptions of tools", value)
    if isinstance(tool.get("function"), Mapping):
        return {**tool, "function": _tool(tool["function"])}
    return dict(_with_object(tool, "parameters", "tools"))


def _part(part: object, column: str) -> object:
    """Read a part of content; text parts are also plain text, or have OpenAI's other types."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise wrong_type(f"{column}.content", "text, or a list of parts with a type", part)
    is_text = part.get("type", "text") in ("text", "input_text", "output_text")
    if is_text and isinstance(part.get("text"), str):
        return {**part, "type": "text"}
    if part.get("type") == "text":
        raise wrong_type(f"{column}.content", "text in its text parts", part.get("text"))
    return part


def _calls(value: object, column: str) -> list[Mapping[str, Any]]:
    calls = structure_of({"tool_calls": value}, "tool_calls", list) or []
    return [_call(call, column) for call in calls]


def _call(value: object, column: str) -> Mapping[str, Any]:
    call = structure_of({"tool_calls": value}, "tool_calls", dict)
    if call is None:
        raise wrong_type(f"{column}.tool_calls", "a list of calls", value)
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"], column)}
    if "arguments" in call or call.keys() <= {"name", "id", "type", "index"}:
        if not (isinstance(name := call.get("name"), str) and name.strip()):
            raise wrong_type(f"{column}.tool_calls", "a list of calls, each with a name", value)
        full = _with_object({"arguments": {}, **call}, "arguments", column)
        if not isinstance(full["arguments"], Mapping):
            raise wrong_type(f"{column}: arguments of {name}", "a JSON object", full["arguments"])
        return full
    return call


def _with_object(owner: Mapping[str, Any], key: str, column: str) -> Mapping[str, Any]:
    """Read an object that is written as JSON text, as OpenAI's API has arguments."""
    value = owner.get(key)
    if not isinstance(value, str):
        return owner
    try:
        value = read_structure(value) if value.strip() else {}
        value = read_structure(value) if isinstance(value, str) else value
    except ValueError as error:
        raise BadRow("wrong type", f"column {column!r}: {key} of a call: {error}") from error
    if not isinstance(value, dict):
        raise wrong_type(f"{column}: {key} of {owner.get('name')}", "a JSON object", value)
    return {**owner, key: value}


@dataclass(frozen=True)
class ChatFormat:
    """How messages become the text that the model reads; options as in `TextDataModule`."""

    tokenizer: PreTrainedTokenizerBase
    template: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] | None = None
    split_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.template is not None:
            object.__setattr__(self, "template", _template_text(self.template))

    @property
    def dated(self) -> bool:
        """Whether today's date may be in the text, as in the templates of Llama 3.2."""
        template = self.template or self.tokenizer.chat_template
        return "strftime_now" in str(template)

    @property
    def constants(self) -> TemplateConstants:
        """What the template knows by name."""
        template = self.template or self.tokenizer.chat_template
        texts = template.values() if isinstance(template, Mapping) else [template or ""]
        return template_constants("".join(texts))

    def render(self, messages: Sequence[Message], row: Row, *, prompt: bool) -> str:
        """Render turns as text, special tokens included.

        Those are the template's own: in what turns say, and in tools, they are split, see
        `lrlhf.models.split_messages`.

        A row's ``tools`` and ``chat_template_kwargs`` come on top of those for all rows. A
        ``prompt`` leaves the assistant's turn open: a new one, or the last if it is its own.

        Raises:
            BadRow: The template refuses the messages.
            ValueError: There is no template.
        """
        goes_on = prompt and messages[-1]["role"] == "assistant"
        return self._rendered(
            messages,
            row,
            add_generation_prompt=prompt and not goes_on,
            continue_final_message=goes_on,
        )

    def opened(self, messages: Sequence[Message], row: Row) -> str:
        """Render turns and the beginning of another one, the assistant's, which need not be asked.

        Raises:
            BadRow: The template refuses the messages.
            ValueError: There is no template.
        """
        text = self._rendered(messages, row, add_generation_prompt=True)
        if not messages or messages[-1]["role"] != "assistant":
            return text
        closed = self.render(messages, row, prompt=False)
        if text != closed:
            return text
        # the template begins the assistant's turns behind those of others only
        user: Turns = ({"role": "user", "content": "a"},)
        with_header, without = (self.render(user, row, prompt=prompt) for prompt in (True, False))
        return closed + with_header.removeprefix(without)

    def _rendered(self, messages: Sequence[Message], row: Row, **options: bool) -> str:
        text = self._applied(
            partial(
                self.tokenizer.apply_chat_template, chat_template=self.template, tokenize=False
            ),
            messages,
            row,
            **options,
        )
        if not isinstance(text, str):
            raise TypeError(f"apply_chat_template returned {type(text).__name__}")
        return rejoined(valid_text(text, "the rendered chat"))

    def render_spans(
        self, messages: Sequence[Message], row: Row, *, without: Container[int] = ()
    ) -> tuple[str, list[Span]]:
        """Render a conversation, and say which characters of it the assistant writes.

        Turns whose numbers are in ``without`` are left out of these.

        A template that marks them (``{% generation %}``) says so itself. Of another one, a turn is
        what it adds to the prompt that leaves this turn open; that must be the same whatever
        follows.

        Raises:
            BadRow: The template refuses the messages, or does not tell the turns apart.
            ValueError: There is no template.
        """
        text = self.render(messages, row, prompt=False)
        template = self.tokenizer.get_chat_template(self.template, self._tools(row))
        if GENERATION.search(template):
            # what `apply_chat_template` calls, which keeps the characters of the marks to itself
            marks = {"return_assistant_tokens_mask": True, **self.tokenizer.special_tokens_map}

            def render(chat: list[dict[str, Any]], **options: Any) -> Any:
                arguments = {"chat_template": template, **marks, **options}
                return render_jinja_template(conversations=[chat], **arguments)

            def spans(turns: Sequence[Message]) -> tuple[str, list[Span]]:
                (raw,), (marked,) = self._applied(render, turns, row)
                # the text of which the marks are
                return valid_text(raw, "the rendered chat"), [
                    (int(rendered[0]), int(rendered[1])) for rendered in marked
                ]

            closing = 0
            if without:  # some templates mark the end of the chat behind an answer that is the last
                user, answer = ({"role": role, "content": "a"} for role in ("user", "assistant"))
                ended, goes_on = (spans(chat)[1] for chat in ([user, answer], [user, answer, user]))
                closing = len(ended) - len(goes_on)

            def count(turns: Sequence[Message]) -> int:
                own = len(spans(turns)[1]) if turns else 0
                return own - closing if turns and turns[-1]["role"] == "assistant" else own

            text, rendered = spans(messages)
            for number in range(len(messages) - 1, -1, -1):
                if number in without:  # its marks are those that the turns before it do not have
                    until = count(messages[: number + 1]) if messages[number + 1 :] else None
                    del rendered[count(messages[:number]) : until]
            return text, rendered
        return text, [
            self._added(messages, number, text, row)
            for number, message in enumerate(messages)
            if message["role"] == "assistant" and number not in without
        ]

    def answer_spans(self, messages: Sequence[Message], row: Row, start: int) -> list[Span] | None:
        """Say which characters belong to an answer in which the assistant speaks twice in a row.

        What begins the second turn is the template's, and not learnt.

        Args:
            messages: Prompt and answer.
            row: As of `render`.
            start: Number of the answer's first turn.

        Returns:
            None: no turn follows another one of the assistant's, and the answer counts as a whole.

        Raises:
            BadRow: The template refuses the messages, or does not tell the turns apart.
        """
        roles = [message["role"] for message in messages]
        second = [
            number
            for number in range(max(start, 1), len(roles))
            if roles[number - 1] == roles[number] == "assistant"
        ]
        if not second:
            return None
        text = self.render(messages, row, prompt=False)
        before = self.opened(messages[:start], row) if start else ""
        begin = len(commonprefix([before, text]))  # noqa: RUF071  of letters, as it is meant
        spans: list[Span] = []
        for number in second:
            closed = self.render(messages[:number], row, prompt=False)
            opened = self.opened(messages[:number], row)
            if not (opened.startswith(closed) and text.startswith(opened)):
                raise BadRow(
                    "unclear turns",
                    f"turn {number + 1} follows another one of the assistant's, and what the chat "
                    "template puts between the two is not clear",
                    remedy="put what the assistant says in a row into one turn",
                )
            if number > start:
                spans.append((begin, len(closed)))
            begin = len(opened)
        return [*spans, (begin, len(text))]

    def _added(self, messages: Sequence[Message], number: int, text: str, row: Row) -> Span:
        """Return what one turn adds to the text of those before it."""
        try:
            before = self.opened(messages[:number], row)
        except BadRow as problem:
            what = "has no turn of another role before it"
            raise self._unclear(messages, number, what) from problem
        until = self.render(messages[: number + 1], row, prompt=False)
        if not until.startswith(before):
            raise self._unclear(
                messages, number, "does not begin with the prompt that leads up to it"
            )
        if not text.startswith(until):
            raise self._unclear(messages, number, "becomes another text where further turns follow")
        return len(before), len(until)

    def _tools(self, row: Row) -> list[dict[str, Any]] | None:
        return read_tools(row) or [_tool(tool) for tool in self.tools or ()] or None

    def _unclear(self, messages: Sequence[Message], number: int, what: str) -> BadRow:
        turn = messages[number]
        text = content_text(turn.get("content"))
        cut = [mark for mark in self.constants.marks if mark in text]
        cut += [key for key in THOUGHT_KEYS if key in turn]
        remedy = "give a `chat_template` with {% generation %} marks"
        if cut:
            remedy = (
                f"give a `chat_template` that keeps all of such turns (this one looks for "
                f"{', '.join(map(repr, cut))} in them)"
            )
        else:
            remedy += ", or set `loss_on` to completion (the last turn) or all"
        return BadRow(
            "unclear turns",
            "the chat template does not mark what the assistant writes, and turn "
            f"{number + 1} {what}",
            remedy=remedy,
        )

    def _in_its_words(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return turns whose roles are called as the template calls them, or raise `BadRow`."""
        known = self.constants.roles
        turns = []
        for number, message in enumerate(messages, start=1):
            role = message["role"]
            if role not in known:
                words = _TEMPLATE_ROLES.get(role)
                if words is None:
                    raise BadRow(
                        "unknown role",
                        f"turn {number} has the role {role!r}, which the chat template does not "
                        f"know{nearest(role, [*_TEMPLATE_ROLES, *_ROLES])}",
                        remedy="name the roles of turns system, user, assistant and tool, or give "
                        "a `chat_template` that has a case for the others",
                    )
                role = next((word for word in words if word in known), words[0])
            turns.append({**message, "role": role})
        return turns

    def _applied(
        self, apply: Callable[..., Any], messages: Sequence[Message], row: Row, **options: bool
    ) -> Any:
        """Apply a template to turns, with the options of all rows and those of this one."""
        if self.template is None and self.tokenizer.chat_template is None:
            raise ValueError(
                f"the rows hold chat messages, and the tokenizer {self.tokenizer.name_or_path!r} "
                "has no chat template: give `chat_template` (a file or the text), take the "
                "tokenizer of an instruction-tuned model, or give plain text rows"
            )
        own = structure_of(row, "chat_template_kwargs", dict) or {}
        tools = self._tools(row)
        turns = self._in_its_words(messages)
        if self.split_special_tokens:
            turns = split_messages(self.tokenizer, turns, self.template)
            own, tools = (split_text(self.tokenizer, value) for value in (own, tools))
        try:
            template = self.tokenizer.get_chat_template(self.template, tools)
            return apply(
                readable_messages(turns, template),
                tools=tools,
                **{**options, **self.kwargs, **own},
            )
        # whatever a template does with data that it was not written for
        except Exception as error:
            raise BadRow(
                "refused by the chat template",
                f"{type(error).__name__}: {error} (the turns: "
                f"{', '.join(str(message['role']) for message in messages)})",
                remedy="check the roles and their order, or give another `chat_template`",
            ) from error


def _template_text(template: str) -> str:
    if "{{" in template or "{%" in template:
        return template
    path = Path(template).expanduser()
    if not path.is_file():
        raise ValueError(
            f"chat_template {template!r} is neither a file nor template text (it has no '{{{{' and "
            "no '{%'): give the path of a .jinja file or the template itself"
        )
    return path.read_text(encoding="utf-8")


Tokens = NDArray[np.int32]
Mask = NDArray[np.bool_]

_CHUNK = 1024
_TELLING = "Ab é\n\n(don't)"


class Text(NamedTuple):
    """Text to be tokenised."""

    text: str
    complete: bool
    """Rendered by a chat template, so that its special tokens are in the text already."""


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text]) -> list[Tokens]:
    """Tokenise whole texts; plain ones get the tokenizer's own special tokens.

    A text that already begins with the BOS token, complete or not, gets no second one. Nothing
    is ever cut.
    """
    tokens: list[Tokens] = [np.empty(0, np.int32)] * len(texts)
    for complete in (False, True):
        rows = [row for row, text in enumerate(texts) if text.complete is complete]
        encoded = _encode(
            tokenizer, [texts[row].text for row in rows], add_special_tokens=not complete
        )
        for row, (ids,) in zip(rows, encoded, strict=True):
            tokens[row] = _single_bos(np.asarray(ids, dtype=np.int32), tokenizer.bos_token_id)
    return tokens


def loses_text(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether ids cannot be read as the text that they are of, as those of most encoders.

    They leave capitals, accents or line breaks out, so that people are to be shown the text itself.
    """
    ids = tokenizer(_TELLING, add_special_tokens=False, verbose=False)["input_ids"]
    return str(tokenizer.decode(ids)) != _TELLING


def with_end(tokenizer: PreTrainedTokenizerBase, text: Text) -> Text:
    """Return a plain text with one end-of-sequence token behind it; others have theirs."""
    end = str(tokenizer.eos_token or "")
    return text if text.complete else text._replace(text=text.text.removesuffix(end) + end)


def tokenize_ended(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text]) -> list[Tokens]:
    """Tokenise, and end plain text with the end-of-sequence token unless it does already."""
    end = tokenizer.eos_token_id
    return [
        ids
        if text.complete or end is None or (len(ids) and ids[-1] == end)
        else np.append(ids, np.int32(end))
        for text, ids in zip(texts, tokenize(tokenizer, texts), strict=True)
    ]


def tokenize_spans(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    spans: Sequence[Sequence[tuple[int, int]]],
) -> list[tuple[Tokens, Mask]]:
    """Tokenise complete texts, and tell which tokens have a character in one of the spans.

    Args:
        tokenizer: A fast one, which knows the characters of its tokens.
        texts: As a chat template renders them.
        spans: Of each text, first character and the one behind the last, in order.

    Raises:
        ValueError: The tokenizer does not know the characters of its tokens.
    """
    if texts and not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} does not tell which characters a token has, "
            "which the turns of the assistant are found by: take its fast version, or set "
            "`loss_on` to completion or all"
        )
    encoded = _encode(tokenizer, texts, add_special_tokens=False, return_offsets_mapping=True)
    tokenized: list[tuple[Tokens, Mask]] = []
    for (row, offsets), own in zip(encoded, spans, strict=True):
        begins, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
        inside = np.zeros(len(row), dtype=np.bool_)
        for first, last in own:
            inside |= (begins < last) & (ends > first)
        ids = _single_bos(np.asarray(row, dtype=np.int32), tokenizer.bos_token_id)
        tokenized.append((ids, inside[len(inside) - len(ids) :]))
    return tokenized


def tokenize_prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text]) -> list[Tokens]:
    """Tokenise texts that are to be continued: as `tokenize`, and nothing comes after the text.

    T5 and BERT tokenizers end every text with a special token, which would tell a policy that
    there is nothing left to say.
    """
    after = _specials_after(tokenizer)
    return [
        ids if text.complete or after == 0 else ids[:-after]
        for text, ids in zip(texts, tokenize(tokenizer, texts), strict=True)
    ]


def _specials_after(tokenizer: PreTrainedTokenizerBase) -> int:
    """Count the special tokens that the tokenizer itself puts after a text."""
    bare, full = (
        _encode(tokenizer, ["a"], add_special_tokens=special)[0][0] for special in (False, True)
    )
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return len(full) - start - len(bare)
    raise ValueError(
        f"the tokenizer {tokenizer.name_or_path!r} tokenises the same text differently with and "
        "without special tokens; use another tokenizer"
    )


class _HasEnds(Protocol):
    @property
    def ends(self) -> tuple[int, ...]: ...


class _HasTexts(Protocol):
    @property
    def texts(self) -> Sequence[_HasEnds]: ...


class TrainedText(NamedTuple):
    """What is learnt of a text."""

    ids: Tokens
    trained: Mask
    ends: tuple[int, ...]
    """Tokens that end it; none: nothing does."""


class Endings:
    """Has what is learnt of an answer include where generation stops.

    A template may write the end behind what it marks as the assistant's, or have the next turn's
    mark end a turn: then that token is learnt too. A text that ends with an answer and without any
    gets the tokenizer's end-of-sequence token. An answer that ends with another special token, as
    those of base models with a chat template do, keeps it: generation is to stop there.

    Args:
        tokenizer: Of the texts.
        stops: Token ids at which generation stops; none: the tokenizer's end-of-sequence token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Collection[int] = ()) -> None:
        self.tokenizer = tokenizer
        own = tokenizer.eos_token_id
        self._stops = sorted({*stops} if stops or own is None else {own})
        self._end = own if own in self._stops or not self._stops else self._stops[0]
        self._special = {*map(tokenizer.convert_tokens_to_ids, special_tokens(tokenizer))}
        others = (tokenizer.bos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id)
        self._marks = self._special - {*others}
        self._blank: dict[int, bool] = {}

    @property
    def mark(self) -> str:
        """What is put behind a text without an end."""
        return "" if self._end is None else str(self.tokenizer.convert_ids_to_tokens(self._end))

    def learnt(self, ids: Tokens, trained: Mask, *, open_ended: bool) -> TrainedText:
        """Return a text with what is learnt of it.

        Args:
            ids: Of the text.
            trained: Which of them are learnt so far.
            open_ended: It may need an end.
        """
        trained, ends = trained.copy(), set[int]()
        edges = np.flatnonzero(np.diff(trained.astype(np.int8), prepend=0, append=0))
        for first, last in edges.reshape(-1, 2).tolist():
            stops = ids[first:last][np.isin(ids[first:last], self._stops)]
            at = self._skip_blank(ids, last - 1, step=-1)
            behind = self._skip_blank(ids, last, step=1)
            if len(stops):
                ends.add(int(stops[-1]))
            elif behind < len(ids) and ids[behind] in self._stops:
                trained[last : behind + 1] = True
                ends.add(int(ids[behind]))
            elif at >= first and int(ids[at]) in self._marks:
                ends.add(int(ids[at]))
            elif open_ended and behind == len(ids) and self._end is not None:
                trained[last:] = True
                ids, trained = np.append(ids, np.int32(self._end)), np.append(trained, True)
                ends.add(self._end)
        return TrainedText(ids, trained, tuple(sorted(ends)))

    @property
    def shown(self) -> str:
        """Where generation stops."""
        tokens = (repr(self.tokenizer.convert_ids_to_tokens(stop)) for stop in self._stops)
        return ", ".join(tokens) or "there is no such token"

    def notes(self, rows: Sequence[_HasTexts]) -> Iterator[str]:
        """Say where what is learnt ends with something else than what stops generation."""
        ends = [text.ends for row in rows for text in row.texts]
        for end in sorted({*chain(*ends)} - {*self._stops}):
            yield (
                f"answers end with {self.tokenizer.convert_ids_to_tokens(end)!r}, and generation "
                f"stops at {self.shown}: SFT and DPO add it to eos_token_id of the model's "
                "generation_config"
            )
        if endless := ends.count(()):
            yield (
                f"in {endless} of {len(ends)} texts nothing is learnt at which generation stops "
                f"({self.shown}): give a chat_template that ends turns with "
                "it, or texts that end with an answer"
            )

    def _skip_blank(self, ids: Tokens, index: int, *, step: int) -> int:
        """Return the first place from one on whose token is more than white space."""
        while 0 <= index < len(ids) and self._is_blank(int(ids[index])):
            index += step
        return index

    def _is_blank(self, token: int) -> bool:
        if token not in self._blank:
            text = str(self.tokenizer.decode([token]))
            self._blank[token] = token not in self._special and not text.strip()
        return self._blank[token]


def common_prefix(first: Tokens, second: Tokens) -> int:
    """Number of leading ids that are equal."""
    shorter = min(len(first), len(second))
    different = np.nonzero(first[:shorter] != second[:shorter])[0]
    return int(different[0]) if len(different) else shorter


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **options: bool
) -> list[tuple[list[Any], ...]]:
    """Return what the tokenizer makes of each text: ids, and offsets where they are wanted."""
    rows: list[tuple[list[Any], ...]] = [()] * len(texts)
    for reader, numbers in readers_of(tokenizer, texts):
        for start in range(0, len(numbers), _CHUNK):
            chosen = numbers[start : start + _CHUNK]
            encoded = reader(
                [texts[number] for number in chosen],
                return_attention_mask=False,
                verbose=False,
                **options,
            )
            columns = [encoded[name] for name in ("input_ids", "offset_mapping") if name in encoded]
            for number, *row in zip(chosen, *columns, strict=True):
                rows[number] = tuple(row)
    return rows


def _single_bos(ids: Tokens, bos: int | None) -> Tokens:
    doubled = bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos
    return ids[1:] if doubled else ids
