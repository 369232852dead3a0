"""One row of a prompt data set, from its columns to the text that is tokenised."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from lrlhf.bounded_templates import BoundedEnvironment
from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.rows.bad_rows import BadRow, missing_column
from lrlhf.datamodules.rows.chat import SYSTEM_COLUMNS, ChatFormat, Text, read_messages, with_system
from lrlhf.datamodules.rows.columns import shown, text_of, valid_text, with_turns
from lrlhf.datamodules.rows.conservation import Reached
from lrlhf.datamodules.rows.media_rows import MediaReader, media_columns
from lrlhf.media import MediaRefs
from lrlhf.models.chat_templates import text_of_parts
from lrlhf.types import Message, Prompt

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_BEFORE_ANSWERS = {"system", "developer", "user"}
"""Roles with which no answer to a user begins, but a conversation does."""
_CLEARLY_REPEATED = 5


def is_transcript(text: str) -> bool:
    """Whether ``text`` is written as Anthropic's HH-RLHF data is."""
    return text.startswith(HUMAN) and ASSISTANT in text


def shared_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Number of leading elements that are equal."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # comparing slices is far faster than going element by element
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def split_texts(first: str, second: str) -> tuple[str, str, str]:
    """Split two texts into the prompt that they share, and the rest of each.

    Transcripts part after the last ``Assistant:`` that both have, so that an answer is a whole
    turn even where both answers begin alike; other texts part at the last white space of what
    they share.
    """
    shared = first[: shared_length(first, second)]
    if is_transcript(first) and is_transcript(second):
        turn = shared.rfind(ASSISTANT)
        end = turn + len(ASSISTANT) if turn >= 0 else 0
    else:
        end = max((match.start() for match in re.finditer(r"\s", shared)), default=0)
    return first[:end], first[end:], second[end:]


def repeat_prompt(prompt: str, first: str, second: str, *, in_chat: bool) -> bool:
    """Whether two texts are prompt and answer, so that the prompt beside them is there twice.

    They are if both begin with the whole prompt. In a chat, where two answers may well say a
    greeting back, the prompt has to have five words or more.
    """
    long_enough = len(prompt.split()) >= (_CLEARLY_REPEATED if in_chat else 1)
    return long_enough and first.startswith(prompt) and second.startswith(prompt)


def split_messages(
    first: Sequence[Message], second: Sequence[Message]
) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]:
    """Split two conversations into the turns that they share, and the rest of each."""
    # at least one turn is left to each, or there would be nothing to score
    end = min(shared_length(first, second), len(first) - 1, len(second) - 1)
    return tuple(first[:end]), tuple(first[end:]), tuple(second[end:])


def without_prompt(
    prompt: Sequence[Message], candidate: Sequence[Message], column: str
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Split a candidate into prompt and answer, if it is a whole conversation with the prompt.

    What stands before the prompt in the conversation, such as a system turn, goes with the prompt;
    a system turn that only the prompt has stays there.

    Raises:
        BadRow: A user has the last word in the prompt, the candidate begins with another turn of a
            user or system, and the prompt is not in it.
    """
    head, turns = ([_turn_text(turn) for turn in prompt], [_turn_text(turn) for turn in candidate])
    repeats = turns[0][0] in _BEFORE_ANSWERS
    for start in range(len(turns) - len(head) + 1 if repeats else 1):
        if head and turns[start : start + len(head)] == head:
            end = start + len(head)
            return tuple(candidate[:end]), tuple(candidate[end:])
    if head and head[0][0] == "system" and head[1:] and turns[: len(head) - 1] == head[1:]:
        return tuple(prompt), tuple(candidate[len(head) - 1 :])
    if repeats and head and head[-1][0] == "user":
        raise BadRow(
            "prompt not in the conversation",
            f"column {column!r} begins with {turns[0][0]} {shown(turns[0][1])} and does not hold "
            f"the prompt, which ends with user {shown(head[-1][1])}",
            remedy="name the right column in `prompt_column`",
        )
    return tuple(prompt), tuple(candidate)


def _turn_text(turn: Message) -> tuple[str, object]:
    """Return the role and content, by which turns are compared."""
    content = turn.get("content")
    text = text_of_parts(content)
    content = content if text is None else text
    return turn["role"], content.strip() if isinstance(content, str) else content


def transcript_messages(text: str) -> tuple[Message, ...]:
    """Read the turns of a ``Human: … Assistant: …`` transcript."""
    pieces = _TURN.split(text)[1:]
    return tuple(
        {"role": _ROLES[speaker], "content": content.strip()}
        for speaker, content in zip(pieces[::2], pieces[1::2], strict=True)
    )


DEFAULT_PROMPT_COLUMN = "prompt"
DIALOGUE_COLUMNS: tuple[str, ...] = ("messages", "conversations")
PAIR_COLUMNS = ("chosen", "rejected")
_NOT_FOR_REWARDS = ("tools", "chat_template_kwargs")


@dataclass(frozen=True)
class PromptDraft:
    """A row that was read and not yet tokenised."""

    prompt: Prompt
    text: Text
    columns: Mapping[str, Any]
    refs: MediaRefs = field(default_factory=MediaRefs)
    system_columns: tuple[str, ...] = SYSTEM_COLUMNS
    """Columns that are no columns like any, as they may hold the system turn."""

    @property
    def reached(self) -> Reached:
        """What of the row the policy reads, and what rewards get."""
        besides = repr((self.columns.get("reference"), self.refs))
        named = self.columns.keys() - {*self.system_columns}
        return Reached(self.text.text, "", besides, named, rendered=self.text.complete)


class ColumnPattern:
    """Replaces a column, or with ``answer -> gold`` another one, by what an expression finds."""

    def __init__(self, target: str, pattern: str) -> None:
        source, arrow, new = (part.strip() for part in target.partition("->"))
        if not source or (arrow and not new):
            raise ValueError(
                f"column_patterns key {target!r}: write `column`, or `column -> new column`"
            )
        self._source = source
        self.target = new or source
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"column_patterns[{target!r}] is no regular expression: {error} in {pattern!r}"
            ) from error

    def find(self, row: Row) -> str:
        """Return what the pattern finds in ``row``, without surrounding space."""
        text = text_of(row, self._source, setting="column_patterns")
        match = self._pattern.search(text)
        if match is None:
            raise BadRow(
                "pattern not found",
                f"column {self._source!r} has no {self._pattern.pattern!r}: {text[-60:]!r}",
                remedy="correct the regular expression in `column_patterns`",
            )
        answer = match.group(1 if self._pattern.groups else 0)
        return (answer or "").strip()


def _not_none(value: Any) -> Any:
    if value is None:
        raise ValueError("it writes a column that has no value in this row")
    return value


class PromptTemplate:
    """A jinja2 template over the columns of a row, rendered in a sandbox."""

    def __init__(
        self,
        template: str,
        *,
        setting: str = "prompt_template",
        finalize: Callable[[Any], Any] = _not_none,
    ) -> None:
        self._setting = setting
        environment = BoundedEnvironment(
            undefined=jinja2.StrictUndefined,
            keep_trailing_newline=True,
            autoescape=False,
            finalize=finalize,
        )
        try:
            self.columns = sorted(
                jinja2.meta.find_undeclared_variables(environment.parse(template))
            )
            self._template = environment.from_string(template)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"{setting} is no jinja2 template: {error.message} (line {error.lineno})"
            ) from error

    def render(self, row: Row) -> str:
        """Fill in the columns of ``row``."""
        for column in self.columns:
            if column not in row:
                raise missing_column(column, row, setting=self._setting)
        try:
            text = str(self._template.render(row))
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
        ) as error:
            raise BadRow(f"{self._setting} failed", f"{type(error).__name__}: {error}") from error
        return valid_text(text, "the rendered template")


@dataclass(frozen=True)
class PromptParser:
    """Reads rows as prompts; options as in `PromptDataModule`."""

    chat: ChatFormat
    column: str = DEFAULT_PROMPT_COLUMN
    template: PromptTemplate | None = None
    as_chat: bool = False
    system_prompt: str | None = None
    patterns: Sequence[ColumnPattern] = field(default_factory=tuple)
    hh_as_chat: bool = False
    media: MediaReader = MediaReader()  # noqa: RUF009  frozen

    def __call__(self, row: Row, folder: Path | None = None) -> PromptDraft:
        """Parse one row, or raise `BadRow`; relative paths start from ``folder``."""
        row = with_turns(row, self.column, *PAIR_COLUMNS)
        row = {**row, **{pattern.target: pattern.find(row) for pattern in self.patterns}}
        prompt, columns = self._prompt(row)
        if isinstance(prompt, str) and self.as_chat:
            prompt = ({"role": "user", "content": prompt},)
        refs = self.media.of_columns(row, folder)
        # rewards get what these columns name as it was read, not its path
        unwanted = {*_NOT_FOR_REWARDS, *(media_columns() if refs else ())}
        # an empty cell of what other rows are read from, where a table holds rows of two kinds
        empty = {self.column, *DIALOGUE_COLUMNS, *PAIR_COLUMNS, *media_columns()}
        columns = {
            key: value
            for key, value in columns.items()
            if key not in unwanted and not (value is None and key in empty)
        }
        # a template says itself what it makes of a system column
        system = SYSTEM_COLUMNS if self.template is None else ()
        if isinstance(prompt, str):
            (prompt,) = self.media.of_texts((prompt,), refs)
            return PromptDraft(prompt, Text(prompt, complete=False), columns, refs, system)
        messages = with_system(prompt, row if system else {}, self.system_prompt)
        prompt, refs = self.media.of_messages(messages, refs, folder)
        text = self.chat.render(prompt, row, prompt=True)
        return PromptDraft(prompt, Text(text, complete=True), columns, refs, system)

    def _prompt(self, row: Row) -> tuple[Prompt, dict[str, Any]]:
        if self.template is not None:
            text = self.template.render(row)
            if not text.strip():
                raise BadRow("empty text", "prompt_template gives an empty prompt")
            return text, dict(row)
        if self._is_pair(row):
            return self._shared_prompt(row)
        column = column_or_dialogue(
            row, self.column, default=DEFAULT_PROMPT_COLUMN, setting="prompt_column"
        )
        columns = {key: value for key, value in row.items() if key != column}
        value = row[column]
        if isinstance(value, str):
            return text_of(row, column), columns
        messages = read_messages(value, column)
        if column in DIALOGUE_COLUMNS and messages[-1]["role"] == "assistant":
            # a whole dialogue: its last turn is the answer that the policy is to find itself
            if columns.get("reference") is None:
                columns["reference"] = _reference(messages[-1])
            messages = messages[:-1]
            if not messages:
                raise BadRow("empty text", f"column {column!r} holds nothing but an answer")
        return messages, columns

    def _is_pair(self, row: Row) -> bool:
        columns = {self.column, *DIALOGUE_COLUMNS}
        default = self.column == DEFAULT_PROMPT_COLUMN
        present = {name for name, value in row.items() if value is not None}
        return default and not columns & present and set(PAIR_COLUMNS) <= present

    def _shared_prompt(self, row: Row) -> tuple[Prompt, dict[str, Any]]:
        """Read the prompt that the two answers of a preference row share."""
        columns = {key: value for key, value in row.items() if key not in PAIR_COLUMNS}
        if not isinstance(row["chosen"], str):
            both = [read_messages(row[name], name) for name in PAIR_COLUMNS]
            messages, answer, _ = split_messages(*both)
            if not messages:
                raise BadRow("empty text", "chosen and rejected share no turn")
            return messages, {**columns, "reference": _reference(answer[-1])}
        text, answer_text, _ = split_texts(*(text_of(row, name) for name in PAIR_COLUMNS))
        if not text.strip():
            raise BadRow("empty text", "chosen and rejected share no prompt")
        columns["reference"] = answer_text.strip()
        if self.hh_as_chat and is_transcript(text):
            return transcript_messages(text.removesuffix(ASSISTANT)), columns
        return text, columns


def _reference(answer: Message) -> Any:
    """Return what a turn says, or its calls where it says nothing."""
    content = answer.get("content")
    text = text_of_parts(content)
    return (content if text is None else text) or answer.get("tool_calls")


def column_or_dialogue(row: Row, column: str, *, default: str, setting: str) -> str:
    """Return ``column``, or where the ``default`` one is missing a dialogue's; else a `BadRow`."""
    for name in (column, *(DIALOGUE_COLUMNS if column == default else ())):
        if row.get(name) is not None:
            return name
    raise missing_column(column, row, setting=setting)
