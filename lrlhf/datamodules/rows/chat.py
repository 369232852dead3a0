"""Chat turns: reading them from rows, and rendering them with the tokenizer's template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from os.path import commonprefix
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lrlhf.bounded_templates import render_jinja_template
from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.columns import structure_of, whole_text, wrong_type
from lrlhf.models import rejoined, split_messages, split_text
from lrlhf.types import Message

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Begins what the assistant writes, as `transformers` knows it."""
Turns = tuple[Message, ...]
Span = tuple[int, int]
"""First character, and the one behind the last."""

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


def read_messages(value: object, column: str) -> tuple[Message, ...]:
    """Read chat turns, written as ``role``/``content`` or as ``from``/``value``.

    Raises:
        BadRow: It is no list of turns, a turn has no role, or no turn has content.
    """
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
    if "from" in entry and "value" in entry:
        role, content = entry["from"], entry["value"]
        if not isinstance(role, str) or role not in _SHAREGPT_ROLES:
            known = ", ".join(_SHAREGPT_ROLES)
            raise BadRow(
                "wrong type", f"column {column!r}: unknown `from` {role!r} (known: {known})"
            )
        rest = {key: value for key, value in entry.items() if key not in ("from", "value")}
        message = {"role": _SHAREGPT_ROLES[role], "content": content, **rest}
    else:
        # tables fill what some messages lack with None; templates test for presence
        message = {key: value for key, value in entry.items() if value is not None}
    if not isinstance(message.get("role"), str):
        raise BadRow(
            "wrong type", f"a message of column {column!r} has no role: {dict(entry)!r:.80}"
        )
    if not isinstance(message.get("content", ""), str | list):
        raise wrong_type(f"{column}.content", "text", message["content"])
    if "content" not in message and "tool_calls" not in message:
        raise BadRow("empty text", f"a message of column {column!r} has no content")
    return message


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
        asked: Turns = ({"role": "user", "content": "a"},)
        with_header, without = (self.render(asked, row, prompt=prompt) for prompt in (True, False))
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
        return rejoined(whole_text(text, "the rendered chat"))

    def render_spans(self, messages: Sequence[Message], row: Row) -> tuple[str, list[Span]]:
        """Render a conversation, and say which characters of it the assistant writes.

        A template that marks them (``{% generation %}``) says so itself. Of another one, a turn is
        what it adds to the prompt that leaves this turn open; that must be the same whatever
        follows.

        Raises:
            BadRow: The template refuses the messages, or does not tell the turns apart.
            ValueError: There is no template.
        """
        text = self.render(messages, row, prompt=False)
        template = self.tokenizer.get_chat_template(self.template, self._tools(row))
        if _GENERATION.search(template):
            # what `apply_chat_template` calls, which keeps the characters of the marks to itself
            marks = {"return_assistant_tokens_mask": True, **self.tokenizer.special_tokens_map}

            def render(chat: list[dict[str, Any]], **options: Any) -> Any:
                given = {"chat_template": template, **marks, **options}
                return render_jinja_template(conversations=[chat], **given)

            (raw,), (marked,) = self._applied(render, messages, row)
            # the text of which the marks are
            return whole_text(raw, "the rendered chat"), [
                (int(one[0]), int(one[1])) for one in marked
            ]
        return text, [
            self._added(messages, number, text, row)
            for number, message in enumerate(messages)
            if message["role"] == "assistant"
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
            raise _unclear(number, "has no turn of another role before it") from problem
        until = self.render(messages[: number + 1], row, prompt=False)
        if not until.startswith(before):
            raise _unclear(number, "does not begin with the prompt that leads up to it")
        if not text.startswith(until):
            raise _unclear(number, "becomes another text where further turns follow")
        return len(before), len(until)

    def _tools(self, row: Row) -> list[dict[str, Any]] | None:
        tools = structure_of(row, "tools", list) or self.tools
        return [dict(tool) for tool in tools] if tools else None

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
        turns = [dict(message) for message in messages]
        if self.split_special_tokens:
            turns = split_messages(self.tokenizer, turns, self.template)
            own, tools = (split_text(self.tokenizer, value) for value in (own, tools))
        try:
            return apply(
                turns,
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


def _unclear(number: int, what: str) -> BadRow:
    return BadRow(
        "unclear turns",
        f"the chat template does not mark what the assistant writes, and turn {number + 1} {what}",
        remedy="give a `chat_template` with {% generation %} marks, or set `loss_on` to completion "
        "(the last turn) or all",
    )


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
