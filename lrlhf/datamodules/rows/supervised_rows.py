"""One row of a supervised data set: from its columns to a text, to tokens that are trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.rows.bad_rows import BadRow, missing_column
from lrlhf.datamodules.rows.chat import (
    LOSS_MARKS,
    ChatFormat,
    Endings,
    Mask,
    Span,
    Text,
    Tokens,
    Turns,
    common_prefix,
    read_messages,
    tokenize,
    tokenize_ended,
    tokenize_spans,
    with_end,
    with_system,
)
from lrlhf.datamodules.rows.collate import media_of, moved_mask, padded
from lrlhf.datamodules.rows.columns import text_of, with_turns
from lrlhf.datamodules.rows.conservation import Reached, after
from lrlhf.datamodules.rows.media_rows import DeferredMedia, MediaReader, TokenizedText, parts_in
from lrlhf.datamodules.rows.preference_rows import digest, keyed
from lrlhf.datamodules.rows.prompt_rows import DIALOGUE_COLUMNS, without_prompt
from lrlhf.media import MediaRefs
from lrlhf.types import SupervisedBatch, TextBatch

BatchT = TypeVar("BatchT", bound=TextBatch)
LossOn: TypeAlias = Literal["all", "completion", "assistant"]


@dataclass(frozen=True)
class SupervisedDraft:
    """A row that was read and not yet tokenised."""

    text: Text
    """Prompt and completion."""
    key: str
    """Rows that share it belong in the same split."""
    prompt: Text | None = None
    """The loss is on what follows it; None: on ``spans``, or on all."""
    spans: tuple[Span, ...] | None = None
    """Characters that the loss is on."""
    answered: bool = False
    """The assistant says the last of it."""
    refs: MediaRefs = field(default_factory=MediaRefs)
    label: bool | None = None
    """Whether an answer is desirable, where the data says so."""

    @property
    def reached(self) -> Reached:
        """What of the row the model reads, and what of it is learnt."""
        text = self.text.text
        learnt = text if self.prompt is None else after(self.prompt.text, text)
        if self.spans is not None:
            learnt = "\n".join(text[first:last] for first, last in self.spans)
        return Reached(text, learnt, repr((self.refs, self.label)), rendered=self.text.complete)


@dataclass(frozen=True, kw_only=True)
class SupervisedRow(TokenizedText):
    """One tokenised text."""

    trained: Mask
    """Whether the loss is on each token."""
    key: str
    label: bool | None = field(default=None, compare=False)
    place: str = field(default="", compare=False)
    """Source and row number; no part of what the row is."""

    def with_media(self, reader: MediaReader) -> SupervisedRow:
        """Read the images and videos, or raise `BadRow`."""
        if self.deferred is None:
            return self
        input_ids, media = reader.read(self.deferred, self.input_ids)
        trained = moved_mask(self.input_ids, self.trained, input_ids, reader.placeholders)
        return replace(self, input_ids=input_ids, trained=trained, media=media)


@dataclass(frozen=True)
class SupervisedParser:
    """Reads rows as texts with what the loss is on; options as in `SupervisedDataModule`."""

    chat: ChatFormat
    media: MediaReader
    loss_on: LossOn | None = None
    messages_column: str = "messages"
    prompt_column: str = "prompt"
    completion_column: str = "completion"
    text_column: str | None = "text"
    as_chat: bool = False
    system_prompt: str | None = None
    or_all: ClassVar[str] = ", or set `loss_on` to all"
    """Ends remedies."""

    def __call__(self, row: Row, folder: Path | None = None) -> SupervisedDraft:
        """Parse one row, or raise `BadRow`; relative paths start from ``folder``."""
        row = with_turns(row, self.prompt_column, self.completion_column)
        if row.get(self.completion_column) is not None:
            return self._pair(row, folder)
        for column in (self.messages_column, *DIALOGUE_COLUMNS):
            if row.get(column) is not None:
                return self._dialogue(read_messages(row[column], column), None, row, folder)
        if self.text_column is not None and row.get(self.text_column) is not None:
            return self._text(row, folder, self.text_column)
        names = [self.messages_column, f"{self.prompt_column} and {self.completion_column}"]
        settings = ["`messages_column`", "`prompt_column` and `completion_column`"]
        if self.text_column is not None:
            names, settings = [*names, self.text_column], [*settings, "`text_column`"]
        expected, known = (f"{', '.join(each[:-1])}, or {each[-1]}" for each in (names, settings))
        raise BadRow(
            "missing column",
            f"it has no column {expected} (columns: {', '.join(sorted(row)) or 'none'})",
            remedy=f"name the right columns in {known}",
        )

    def _text(self, row: Row, folder: Path | None, column: str) -> SupervisedDraft:
        if self.loss_on in ("completion", "assistant"):
            raise BadRow(
                "no completion",
                f"column {column!r} is a whole text, and loss_on is {self.loss_on}",
                remedy="set `loss_on` to all, or give `prompt` and `completion`, or `messages`",
            )
        refs = self.media.of_columns(row, folder)
        (text,) = self.media.of_texts((text_of(row, column),), refs)
        return SupervisedDraft(Text(text, complete=False), keyed(text, refs), refs=refs)

    def _pair(self, row: Row, folder: Path | None) -> SupervisedDraft:
        """Read a prompt and what follows it."""
        prompt, completion = row.get(self.prompt_column), row[self.completion_column]
        if prompt is None:
            raise missing_column(self.prompt_column, row, setting="prompt_column")
        if self.as_chat or any(isinstance(each, list | tuple) for each in (prompt, completion)):
            before = self._turns(row, self.prompt_column, "user")
            after = self._turns(row, self.completion_column, "assistant")
            before, after = without_prompt(before, after, self.completion_column)
            return self._dialogue((*before, *after), len(before), row, folder)
        if self.loss_on == "assistant":
            raise BadRow(
                "no turns",
                "prompt and completion are plain text, and loss_on is assistant",
                remedy="set `loss_on` to completion, or make them turns of a chat: as_chat: true",
            )
        prompt_text = text_of(row, self.prompt_column, allow_empty=True)
        answer = text_of(row, self.completion_column)
        refs = self.media.of_columns(row, folder)
        prompt_text, answer = self.media.of_texts((prompt_text, answer), refs)
        return SupervisedDraft(
            Text(prompt_text + answer, complete=False),
            keyed(prompt_text or answer, self.media.refs_within((prompt_text or answer,), refs)),
            prompt=None if self.loss_on == "all" else Text(prompt_text, complete=False),
            refs=refs,
        )

    def _turns(self, row: Row, column: str, role: str) -> Turns:
        if isinstance(row[column], str):
            return ({"role": role, "content": text_of(row, column)},)
        return read_messages(row[column], column)

    def _dialogue(
        self, messages: Turns, start: int | None, row: Row, folder: Path | None
    ) -> SupervisedDraft:
        """Read turns, of which the completion begins with number ``start``; None: is the last."""
        count = len(messages)
        messages = with_system(messages, row, self.system_prompt)
        start = None if start is None else start + len(messages) - count
        default: LossOn = "assistant" if start is None else "completion"
        loss_on = self.loss_on or default
        first = next((i for i, one in enumerate(messages) if one["role"] == "assistant"), None)
        if start is None:
            start = len(messages) - 1
            if loss_on == "completion" and messages[-1]["role"] != "assistant":
                raise _is_blank("the last turn is not the assistant's", self.or_all)
        if loss_on == "assistant" and first is None:
            raise _is_blank("no turn is the assistant's", self.or_all)
        masked = _masked_turns(messages)
        if masked and loss_on == "all":
            raise BadRow(
                "masked turns",
                f"turn {min(masked) + 1} is marked as not to be learnt, and loss_on is all",
                remedy="set `loss_on` to assistant or completion, or leave such marks out",
            )
        shown = self.media.of_columns(row, folder)
        messages, refs = self.media.of_messages(messages, shown, folder)
        prompt = messages[:first]
        draft = partial(
            SupervisedDraft,
            key=keyed(repr([*map(dict, prompt)]), refs.first(parts_in(prompt))),
            answered=messages[-1]["role"] == "assistant",
            refs=refs,
        )
        if loss_on == "completion" and any(number >= start for number in masked):
            # of a completion of several turns the others are learnt, as far as they are answers
            masked |= {*range(start)}
            loss_on = "assistant"
        if loss_on == "assistant":
            if all(i in masked for i, one in enumerate(messages) if one["role"] == "assistant"):
                raise _is_blank("every answer is marked as not to be learnt")
            text, spans = self.chat.render_spans(messages, row, without=masked)
            return draft(Text(text, complete=True), spans=tuple(spans))
        rendered = Text(self.chat.render(messages, row, prompt=False), complete=True)
        if loss_on == "all":
            return draft(rendered)
        own = self.chat.answer_spans(messages, row, start)
        if own is not None:
            return draft(rendered, spans=tuple(own))
        before = self.chat.render(messages[:start], row, prompt=True) if start else ""
        return draft(rendered, prompt=Text(before, complete=True))


def _masked_turns(messages: Turns) -> set[int]:
    """Return the numbers of the assistant's turns that are marked as not to be learnt.

    Raises:
        BadRow: A mark is neither true nor false, or two of a turn differ.
    """
    masked = set()
    for number, turn in enumerate(messages):
        marks = {key: turn[key] for key in LOSS_MARKS if turn.get(key) is not None}
        if turn["role"] != "assistant" or not marks:
            continue
        if any(isinstance(mark, str) or mark not in (0, 1) for mark in marks.values()) or (
            len(set(map(bool, marks.values()))) > 1
        ):
            listed = ", ".join(f"{key} {mark!r}" for key, mark in marks.items())
            raise BadRow(
                "unclear loss mark",
                f"turn {number + 1} has {listed}: a turn is learnt (1, true) or not (0, false)",
                remedy="give each turn one mark, 0 or 1; shares of data sets are `weight`s of "
                "their entries in `train`",
            )
        if not all(marks.values()):
            masked.add(number)
    return masked


def _is_blank(what: str, otherwise: str = "") -> BadRow:
    return BadRow("no completion", what, remedy=f"leave the row out{otherwise}")


def tokenize_supervised(
    tokenizer: PreTrainedTokenizerBase,
    drafts: Sequence[SupervisedDraft],
    endings: Endings,
) -> list[SupervisedRow | BadRow]:
    """Tokenise texts, and tell which tokens the loss is on.

    A completion begins where the ids of prompt and completion part from those of the prompt alone,
    so that a token which spans both counts as completion. Where generation stops is learnt too, see
    `Endings`. No loss is on the first token of a text, which nothing predicts.
    """
    marked = [draft for draft in drafts if draft.spans is not None]
    spans = [draft.spans or () for draft in marked]
    with_spans = iter(tokenize_spans(tokenizer, [draft.text.text for draft in marked], spans))
    plain = [draft for draft in drafts if draft.spans is None]
    encoded = iter(tokenize_ended(tokenizer, [draft.text for draft in plain]))
    prompts = [draft.prompt for draft in plain if draft.prompt is not None]
    before = iter(tokenize(tokenizer, prompts))
    rows: list[SupervisedRow | BadRow] = []
    for draft in drafts:
        if draft.spans is not None:
            ids, trained = next(with_spans)
        else:
            ids = next(encoded)
            start = 0 if draft.prompt is None else common_prefix(next(before), ids)
            trained = np.arange(len(ids)) >= start
        rows.append(_row(endings, draft, ids, trained))
    return rows


def _row(
    endings: Endings, draft: SupervisedDraft, ids: Tokens, trained: Mask
) -> SupervisedRow | BadRow:
    trained = trained & (np.arange(len(ids)) > 0)
    if not trained.any():
        return BadRow("too short", "there is no token to train on")
    text = with_end(endings.tokenizer, draft.text)
    learnt = endings.learnt(ids, trained, open_ended=draft.text.complete and draft.answered)
    if len(learnt.ids) > len(ids):
        text = text._replace(text=text.text + endings.mark)
    if draft.answered and not learnt.ends:
        return BadRow(
            "no end of a turn",
            "nothing that is learnt of it is a token at which generation stops "
            f"({endings.shown}), so that the model would never end its turns",
            remedy="give a `chat_template` that ends turns with such a token, inside its "
            "{% generation %} marks if it has any",
        )
    return SupervisedRow(
        input_ids=learnt.ids,
        trained=learnt.trained,
        ends=learnt.ends,
        key=digest(draft.key),
        label=draft.label,
        deferred=DeferredMedia(text, draft.refs) if draft.refs else None,
    )


def collate_supervised(
    rows: Sequence[SupervisedRow],
    pad_token_id: int,
    kind: Callable[..., BatchT] = SupervisedBatch,  # type: ignore[assignment]
) -> BatchT:
    """Make a right-padded batch."""
    input_ids, attention_mask = padded(rows, pad_token_id, "right")
    trained = [torch.from_numpy(row.trained) for row in rows]
    return kind(
        input_ids=input_ids,
        attention_mask=attention_mask,
        response_mask=pad_sequence(trained, batch_first=True, padding_value=False),
        media=media_of(rows),
        places=tuple(row.place for row in rows),
    )
