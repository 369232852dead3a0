"""One row of a prompt data set, from its columns to the text that is tokenised."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from lrlhf.bounded_templates import BoundedEnvironment
from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.rows.bad_rows import BadRow, missing_column
from lrlhf.datamodules.rows.chat import SYSTEM_COLUMNS, ChatFormat, read_messages, with_system
from lrlhf.datamodules.rows.columns import text_of, whole_text, with_turns
from lrlhf.datamodules.rows.conservation import Reached
from lrlhf.datamodules.rows.implicit_prompts import (
    ASSISTANT,
    is_transcript,
    split_messages,
    split_texts,
    transcript_messages,
)
from lrlhf.datamodules.rows.media_rows import MediaReader, media_columns
from lrlhf.datamodules.rows.tokenizing import Text
from lrlhf.media import MediaRefs
from lrlhf.models.chat_messages import text_of_parts
from lrlhf.types import Message, Prompt

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
        found = match.group(1 if self._pattern.groups else 0)
        return (found or "").strip()


def _not_none(value: Any) -> Any:
    if value is None:
        raise ValueError("it writes a column that has no value in this row")
    return value


class PromptTemplate:
    """A jinja2 template over the columns of a row, rendered in a sandbox."""

    def __init__(self, template: str) -> None:
        environment = BoundedEnvironment(
            undefined=jinja2.StrictUndefined,
            keep_trailing_newline=True,
            autoescape=False,
            finalize=_not_none,
        )
        try:
            self._columns = sorted(
                jinja2.meta.find_undeclared_variables(environment.parse(template))
            )
            self._template = environment.from_string(template)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"prompt_template is no jinja2 template: {error.message} (line {error.lineno})"
            ) from error

    def render(self, row: Row) -> str:
        """Fill in the columns of ``row``."""
        for column in self._columns:
            if column not in row:
                raise missing_column(column, row, setting="prompt_template")
        try:
            text = str(self._template.render(row))
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
        ) as error:
            raise BadRow("prompt_template failed", f"{type(error).__name__}: {error}") from error
        return whole_text(text, "the rendered template")


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
        asked = with_system(prompt, row if system else {}, self.system_prompt)
        prompt, refs = self.media.of_messages(asked, refs, folder)
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
        wanted = {self.column, *DIALOGUE_COLUMNS}
        default = self.column == DEFAULT_PROMPT_COLUMN
        present = {name for name, value in row.items() if value is not None}
        return default and not wanted & present and set(PAIR_COLUMNS) <= present

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
