"""Texts, prompts with completions and conversations to be learnt as they are."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L

from lrlhf.datamodules.core import RowKind
from lrlhf.datamodules.loading.sources import Data
from lrlhf.datamodules.loading.validation import Validation
from lrlhf.datamodules.rows.chat import Endings
from lrlhf.datamodules.rows.supervised_rows import (
    LossOn,
    SupervisedDraft,
    SupervisedParser,
    SupervisedRow,
    collate_supervised,
    tokenize_supervised,
)
from lrlhf.datamodules.text import TextDataModule, of_module
from lrlhf.types import SupervisedBatch


class SupervisedDataModule(TextDataModule[SupervisedRow, SupervisedBatch]):
    """Loads texts for `lrlhf.modules.SFT`.

    Sources are those of `PreferenceDataModule`: files, folders, hub ids, or rows from Python. Rows
    come as

    - ``messages`` (or ``conversations``): the turns of a chat, which the chat template renders;
    - ``prompt`` and ``completion``: text, or turns;
    - ``text``: plain text.

    One data set may mix them. A turn of the assistant whose ``weight``, ``train``, ``trainable``,
    ``loss_mask`` or ``loss`` is 0 or false is not learnt. Plain text ends with the tokenizer's
    end-of-sequence token, and so does a chat behind whose last answer the template writes nothing
    at which generation stops. Images, videos and audio stand in the parts of messages, or in the
    columns ``image``, ``images``, ``video``, ``videos``, ``audio`` and ``audios``; no loss is on
    them. The loss is never on the first token of a text.

    Args:
        train: One source, a list of them, or rows; `Weighted` entries give each a share of an
            epoch.
        val: Validation data of its own, every row of which is kept: as ``train``, or several sets
            by their names, see `ValidationSet`.
        loss_on: What is trained on. ``all``: every token. ``completion``: what follows the prompt;
            of messages the last turn, which must be the assistant's; not what begins a turn of the
            assistant behind another one. ``assistant``: every turn of the assistant, as the chat
            template marks it (``{% generation %}``); of a template without marks what each of them
            adds to the prompt before it, and rows of which that is not clear are bad rows. None:
            completions, the assistant's turns, and whole texts.
        messages_column: Column with the turns.
        prompt_column: Column with the prompt.
        completion_column: Column with what follows it.
        text_column: Column with a whole text.
        as_chat: Make plain prompts and completions the turns of a chat.
        system_prompt: First turn of chats that have none of this role, nor a column ``system`` or
            ``system_prompt``.
        max_tokens: Longer rows are left out and counted, never cut.
        **options: Those of `TextDataModule` (tokenizer, chat template, tools, media) and
            `RowDataModule` (batch sizes, held-out rows, order, workers).
    """

    def __init__(  # noqa: PLR0913 - the constructor is the schema of the config
        self,
        train: Data,
        val: Validation | None = None,
        *,
        loss_on: LossOn | None = None,
        messages_column: str = "messages",
        prompt_column: str = "prompt",
        completion_column: str = "completion",
        text_column: str = "text",
        as_chat: bool = False,
        system_prompt: str | None = None,
        max_tokens: int | None = None,
        **options: Any,
    ) -> None:
        self._row_options: dict[str, Any] = {
            "loss_on": loss_on,
            "messages_column": messages_column,
            "prompt_column": prompt_column,
            "completion_column": completion_column,
            "text_column": text_column,
            "as_chat": as_chat,
            "system_prompt": system_prompt,
        }
        super().__init__(self._texts, train, val, row_options=self._row_options, **options)
        self._max_tokens = max_tokens

    def _texts(
        self, trainer: L.Trainer | None, **changed: Any
    ) -> RowKind[SupervisedDraft, SupervisedRow, SupervisedBatch]:
        options = {**self._row_options, **changed}
        return text_kind(self, trainer, self._max_tokens, SupervisedParser, **options)


def text_kind(
    data: TextDataModule[Any, Any],
    trainer: L.Trainer | None,
    max_tokens: int | None,
    parser: type[SupervisedParser],
    **options: Any,
) -> RowKind[SupervisedDraft, SupervisedRow, SupervisedBatch]:
    """Return how texts are read; ``options`` are those of the parser."""
    tokenizer, chat, media = data.reader(trainer)
    media = media.limited(max_tokens, "max_tokens", ", or cut the texts into passages")
    endings = Endings(tokenizer, of_module(trainer, "end_token_ids") or ())
    return RowKind(
        parse=parser(chat, media, **options),
        reached=lambda draft: draft.reached,
        constants=chat.constants,
        finish=lambda drafts: media.check(tokenize_supervised(tokenizer, drafts, endings)),
        collate=partial(collate_supervised, pad_token_id=int(tokenizer.pad_token_id)),
        keys=lambda row: (row.key,),
        texts=lambda draft: (draft.text.text,),
        notes=endings.notes,
        placed=lambda row, place: replace(row, place=place),
        read=media,
        cost=lambda row: None if row.deferred else len(row.input_ids),
        tokenizer=tokenizer,
        made_with=(tokenizer,),
        dated=chat.dated,
    )
