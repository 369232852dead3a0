"""One row of a supervised data set: from its columns to a text, to tokens that are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.rows.bad_rows import BadRow, missing_column
from lrlhf.datamodules.rows.chat import ChatFormat, Span, read_messages
from lrlhf.datamodules.rows.collate import media_of, padded
from lrlhf.datamodules.rows.columns import text_of
from lrlhf.datamodules.rows.implicit_prompts import without_prompt
from lrlhf.datamodules.rows.media_rows import MediaReader, TokenizedText, Unread
from lrlhf.datamodules.rows.preference_rows import digest
from lrlhf.datamodules.rows.prompt_rows import DIALOGUE_COLUMNS
from lrlhf.datamodules.rows.tokenizing import (
    Mask,
    Text,
    Tokens,
    common_prefix,
    tokenize,
    tokenize_ended,
    tokenize_spans,
    with_end,
)
from lrlhf.media import MediaRefs
from lrlhf.types import Message, SupervisedBatch

LossOn: TypeAlias = Literal["all", "completion", "assistant"]

Turns = tuple[Message, ...]


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
    refs: MediaRefs = field(default_factory=MediaRefs)


@dataclass(frozen=True, kw_only=True)
class SupervisedRow(TokenizedText):
    """One tokenised text."""

    trained: Mask
    """Whether the loss is on each token."""
    key: str
    place: str = field(default="", compare=False)
    """Source and row number; no part of what the row is."""

    def with_media(self, reader: MediaReader) -> SupervisedRow:
        """Read the images and videos, or raise `BadRow`."""
        if self.unread is None:
            return self
        input_ids, media = reader.read(self.unread, self.input_ids)
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
    text_column: str = "text"
    as_chat: bool = False
    system_prompt: str | None = None

    def __call__(self, row: Row, folder: Path | None = None) -> SupervisedDraft:
        """Parse one row, or raise `BadRow`; relative paths start from ``folder``."""
        if self.completion_column in row:
            return self._pair(row, folder)
        for column in (self.messages_column, *DIALOGUE_COLUMNS):
            if column in row:
                return self._dialogue(read_messages(row[column], column), None, row, folder)
        if self.text_column in row:
            return self._text(row, folder)
        wanted = f"{self.messages_column}, {self.prompt_column} and {self.completion_column}, or "
        columns = ", ".join(sorted(row)) or "none"
        raise BadRow(
            "missing column",
            f"it has no column {wanted}{self.text_column} (columns: {columns})",
            remedy="name the right columns in `messages_column`, `prompt_column` and "
            "`completion_column`, or `text_column`",
        )

    def _text(self, row: Row, folder: Path | None) -> SupervisedDraft:
        if self.loss_on in ("completion", "assistant"):
            raise BadRow(
                "no completion",
                f"column {self.text_column!r} is a whole text, and loss_on is {self.loss_on}",
                remedy="set `loss_on` to all, or give `prompt` and `completion`, or `messages`",
            )
        text = text_of(row, self.text_column)
        return SupervisedDraft(
            Text(text, complete=False), text, refs=self.media.of_columns(row, folder)
        )

    def _pair(self, row: Row, folder: Path | None) -> SupervisedDraft:
        """Read a prompt and what follows it."""
        prompt, completion = row.get(self.prompt_column), row[self.completion_column]
        if self.prompt_column not in row:
            raise missing_column(self.prompt_column, row, setting="prompt_column")
        if self.as_chat or any(isinstance(one, list | tuple) for one in (prompt, completion)):
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
        asked = text_of(row, self.prompt_column, allow_empty=True)
        said = text_of(row, self.completion_column)
        refs = self.media.of_columns(row, folder)
        return SupervisedDraft(
            Text(asked + said, complete=False),
            _keyed(asked or said, refs),
            prompt=None if self.loss_on == "all" else Text(asked, complete=False),
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
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": self.system_prompt}, *messages)
            start = None if start is None else start + 1
        default: LossOn = "assistant" if start is None else "completion"
        loss_on = self.loss_on or default
        first = next((i for i, one in enumerate(messages) if one["role"] == "assistant"), None)
        if start is None:
            start = len(messages) - 1
            if loss_on == "completion" and messages[-1]["role"] != "assistant":
                raise _nothing_said("the last turn is not the assistant's")
        if loss_on == "assistant" and first is None:
            raise _nothing_said("no turn is the assistant's")
        shown = self.media.of_columns(row, folder)
        messages, refs = self.media.of_messages(messages, shown, folder)
        draft = partial(
            SupervisedDraft, key=_keyed(repr([*map(dict, messages[:first])]), refs), refs=refs
        )
        if loss_on == "assistant":
            text, spans = self.chat.render_spans(messages, row)
            return draft(Text(text, complete=True), spans=tuple(spans))
        whole = Text(self.chat.render(messages, row, prompt=False), complete=True)
        if loss_on == "all":
            return draft(whole)
        before = self.chat.render(messages[:start], row, prompt=True) if start else ""
        return draft(whole, prompt=Text(before, complete=True))


def _nothing_said(what: str) -> BadRow:
    return BadRow("no completion", what, remedy="leave the row out, or set `loss_on` to all")


def _keyed(key: str, refs: MediaRefs) -> str:
    # the same question about another picture is another prompt
    return f"{key}\n{refs.key}" if refs else key


def tokenize_supervised(
    tokenizer: PreTrainedTokenizerBase, drafts: Sequence[SupervisedDraft]
) -> list[SupervisedRow | BadRow]:
    """Tokenise texts, and tell which tokens the loss is on.

    A completion begins where the ids of prompt and completion part from those of the prompt alone,
    so that a token which spans both counts as completion. No loss is on the first token of a text,
    which nothing predicts.
    """
    marked = [draft for draft in drafts if draft.spans is not None]
    spans = [draft.spans or () for draft in marked]
    with_spans = iter(tokenize_spans(tokenizer, [draft.text.text for draft in marked], spans))
    plain = [draft for draft in drafts if draft.spans is None]
    whole = iter(tokenize_ended(tokenizer, [draft.text for draft in plain]))
    prompts = [draft.prompt for draft in plain if draft.prompt is not None]
    before = iter(tokenize(tokenizer, prompts))
    rows: list[SupervisedRow | BadRow] = []
    for draft in drafts:
        if draft.spans is not None:
            ids, trained = next(with_spans)
        else:
            ids = next(whole)
            start = 0 if draft.prompt is None else common_prefix(next(before), ids)
            trained = np.arange(len(ids)) >= start
        rows.append(_row(tokenizer, draft, ids, trained))
    return rows


def _row(
    tokenizer: PreTrainedTokenizerBase, draft: SupervisedDraft, ids: Tokens, trained: Mask
) -> SupervisedRow | BadRow:
    trained = trained & (np.arange(len(ids)) > 0)
    if not trained.any():
        return BadRow("too short", "there is no token to train on")
    unread = Unread(with_end(tokenizer, draft.text), draft.refs) if draft.refs else None
    return SupervisedRow(input_ids=ids, trained=trained, key=digest(draft.key), unread=unread)


def moved_mask(short: Tokens, mask: Mask, long: Tokens, placeholders: Sequence[int]) -> Mask:
    """Find the tokens of a mask again, where each placeholder has become several tokens.

    No loss is on what stands for an image or video.

    Args:
        short: Ids with one placeholder for each image or video.
        mask: Of these.
        long: Ids of the same text as the model reads it.
        placeholders: Ids that stand for images and videos.

    Raises:
        BadRow: The texts between images occur in more than one place that they could have.
    """
    marks = np.isin(short, placeholders)
    if (mask | marks)[1:].all():
        return ~np.isin(long, placeholders) & (np.arange(len(long)) > 0)
    first = _expanded(short, mask, long, placeholders, marks)
    back = _expanded(short[::-1], mask[::-1], long[::-1], placeholders, marks[::-1])
    if first is None or back is None or not np.array_equal(first, back[::-1]):
        raise BadRow(
            "unclear turns",
            "where the texts between its images are in the model's input is not clear",
            remedy="show the images in one turn, or set `loss_on` to all",
        )
    return first


def _expanded(
    short: Tokens, mask: Mask, long: Tokens, placeholders: Sequence[int], marks: Mask
) -> Mask | None:
    """Place what is between placeholders as early as it fits; None: it does not."""
    moved = np.zeros(len(long), dtype=np.bool_)
    cuts = [-1, *np.nonzero(marks)[0].tolist(), len(short)]
    shown = np.isin(long, placeholders)
    place = 0
    for number, (left, right) in enumerate(pairwise(cuts)):
        piece, own = short[left + 1 : right], mask[left + 1 : right]
        if number:  # behind what the image has become, of which one token at least is its mark
            found = np.nonzero(shown[place:])[0]
            if not len(found):
                return None
            place += int(found[0]) + 1
            if right == len(short):
                place = max(place, len(long) - len(piece))
        while not np.array_equal(long[place : place + len(piece)], piece):
            place += 1
            if not number or place + len(piece) > len(long):
                return None
        moved[place : place + len(piece)] = own
        place += len(piece)
    return moved if place == len(long) else None


def collate_supervised(rows: Sequence[SupervisedRow], pad_token_id: int) -> SupervisedBatch:
    """Make a right-padded batch."""
    input_ids, attention_mask = padded(rows, pad_token_id, "right")
    trained = [torch.from_numpy(row.trained) for row in rows]
    return SupervisedBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        response_mask=pad_sequence(trained, batch_first=True, padding_value=False),
        media=media_of(rows),
        places=tuple(row.place for row in rows),
    )
