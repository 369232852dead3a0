"""Prompts for on-policy training."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules.adaptive import AdaptiveLoader, AdaptivePrompts
from lrlhf.datamodules.core import RowKind, refuse_unreadable
from lrlhf.datamodules.datasets.pretraining import DEFAULT_TEXT_COLUMN, PretrainingTexts
from lrlhf.datamodules.loading.loader import TrainLoader, data_ranks
from lrlhf.datamodules.loading.sources import Data, entries_of
from lrlhf.datamodules.loading.splits import FirstRows, Split
from lrlhf.datamodules.loading.validation import Validation
from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.chat import tokenize_prompts
from lrlhf.datamodules.rows.collate import PromptRow, collate_prompts, with_place
from lrlhf.datamodules.rows.media_rows import DeferredMedia
from lrlhf.datamodules.rows.prompt_rows import (
    DEFAULT_PROMPT_COLUMN,
    ColumnPattern,
    PromptDraft,
    PromptParser,
    PromptTemplate,
)
from lrlhf.datamodules.text import TextDataModule
from lrlhf.types import PromptBatch

logger = logging.getLogger(__name__)


class PromptDataModule(TextDataModule[PromptRow, PromptBatch]):
    r"""Loads prompts; every other column of a row is passed on to the rewards.

    A source is a file (.jsonl, .json, .parquet, .csv, each optionally .gz), a folder or pattern of
    such files, a hub id (``owner/name:config@split``), or a `Source` such as `ReasoningGym`.
    From Python it may also be rows: a list of dicts, a dict of columns, a DataFrame, a
    ``datasets.Dataset`` or any other object with a length, see `MemorySource`.

    A prompt is text, or a list of messages that the chat template renders. In whole dialogues
    (columns ``messages`` and ``conversations``) the last assistant turn is left out and passed on
    as ``reference``. Preference rows (columns ``chosen`` and ``rejected``, as in HH-RLHF) give the
    prompt that both answers share, and the better one as ``reference``. A row's ``tools`` and
    ``chat_template_kwargs`` reach the template.

    A multimodal model is shown what the parts of messages (``{"type": "image", "image": …}``)
    and the columns ``image``, ``images``, ``video``, ``videos``, ``audio`` and ``audios`` hold:
    paths, bytes, ``data:`` URIs, pixels, samples. They are read when a row comes into a batch;
    rewards get them as ``images``, ``videos`` and ``audios``.

    Args:
        train: One source, a list of them, or rows; `Weighted` entries give each a share of an
            epoch.
        val: Validation data of its own, every row of which is kept: as ``train``, or several sets
            by their names, see `ValidationSet`.
        prompt_column: Column with the prompt.
        prompt_template: A jinja2 template over the columns that makes the prompt instead, such as
            ``"5 + 3 = 8\n{{ metadata.expression }} ="``.
        as_chat: Make a plain text prompt the user's turn of a chat.
        hh_as_chat: Make the shared ``Human: … Assistant: …`` transcript of a pair a chat.
        system_prompt: System turn of every chat that has none, nor a column ``system`` or
            ``system_prompt``.
        column_patterns: Regular expressions that cut a column down to what they find, by column:
            ``{answer: "####\\s*(.+)"}``, or ``{"answer -> gold": …}`` for a new column. The first
            group counts.
        max_prompt_tokens: Rows with longer prompts are left out and counted, never cut.
        deduplicate: Keep only the first of the rows with equal prompts.
        prompt_sampler: Draw the prompts of most learnability, see `AdaptivePrompts`; None: every
            prompt once in an epoch.
        pretraining: Texts of a second stream that goes into the policy's loss (PTX): sources as
            for ``train``, whose rows have a plain text, or whole dialogues in ``messages`` or
            ``conversations`` that the chat template renders. Every train batch carries some.
        pretraining_batch_size: Texts per step and rank; None: as ``batch_size``.
        pretraining_column: Column with the text, or with messages.
        pretraining_max_tokens: Longer texts are left out and counted, never cut.
        **options: Those of `TextDataModule` (tokenizer, chat template, tools, media) and
            `RowDataModule` (batch sizes, held-out rows, order, workers).
    """

    def __init__(  # noqa: PLR0913 - the constructor is the schema of the config
        self,
        train: Data,
        val: Validation | None = None,
        *,
        prompt_column: str = DEFAULT_PROMPT_COLUMN,
        prompt_template: str | None = None,
        as_chat: bool = False,
        hh_as_chat: bool = False,
        system_prompt: str | None = None,
        column_patterns: dict[str, str] | None = None,
        max_prompt_tokens: int | None = None,
        deduplicate: bool = False,
        prompt_sampler: AdaptivePrompts | None = None,
        pretraining: Data | None = None,
        pretraining_batch_size: int | None = None,
        pretraining_column: str = DEFAULT_TEXT_COLUMN,
        pretraining_max_tokens: int = 1024,
        **options: Any,
    ) -> None:
        self._row_options: dict[str, Any] = {
            "prompt_column": prompt_column,
            "prompt_template": prompt_template,
            "as_chat": as_chat,
            "hh_as_chat": hh_as_chat,
            "system_prompt": system_prompt,
            "column_patterns": column_patterns,
        }
        _parser_of(**self._row_options)  # what cannot be read is refused at once
        super().__init__(self._prompts, train, val, row_options=self._row_options, **options)
        self._max_tokens = max_prompt_tokens
        self._deduplicate = deduplicate
        self._adaptive = prompt_sampler
        if prompt_sampler is not None and (self._num_workers or not self._shuffle):
            raise ValueError(
                "prompt_sampler draws a batch when the one before is scored: set num_workers: 0 "
                "and shuffle: true, or drop it"
            )
        self._pretraining: PretrainingTexts | None = None
        if pretraining is not None:
            self._besides = entries_of(pretraining, "pretraining")
            self._pretraining = PretrainingTexts(
                self._besides,
                column=pretraining_column,
                batch_size=(
                    self._batch_size if pretraining_batch_size is None else pretraining_batch_size
                ),
                max_tokens=pretraining_max_tokens,
                max_bad_fraction=self._max_bad_fraction,
                seed=self._seed,
            )

    def first_rows(self, module: object, number: int) -> list[FirstRows[PromptRow]]:
        train, *held_out = super().first_rows(module, number)
        if self._adaptive is not None and self._adaptive.source_weights is not None:
            for row in train.rows:
                self._adaptive.source_of(row.columns)
        return [train, *held_out]

    def _prompts(
        self, trainer: L.Trainer | None, **changed: Any
    ) -> RowKind[PromptDraft, PromptRow, PromptBatch]:
        reader = tokenizer, chat, media = self.reader(trainer)
        media = media.limited(self._max_tokens, "max_prompt_tokens")
        companion = None
        if self._pretraining is not None:
            refuse = partial(refuse_unreadable, trainer)
            companion = partial(self._pretraining.stream, reader, data_ranks(trainer), refuse)
        return RowKind(
            parse=_parser_of(**{**self._row_options, **changed})(chat, media=media),
            reached=lambda draft: draft.reached,
            constants=chat.constants,
            finish=lambda drafts: media.check(tokenize_drafts(tokenizer, drafts)),
            collate=partial(collate_prompts, pad_token_id=int(tokenizer.pad_token_id)),
            keys=lambda row: (_key(row),),
            texts=lambda draft: (draft.text.text,),
            placed=with_place,
            check=_without_duplicates if self._deduplicate else lambda split, _: split,
            read=media,
            companion=companion,
            loader=partial(AdaptiveLoader, adaptive=self._adaptive)
            if self._adaptive
            else TrainLoader,
            tokenizer=tokenizer,
            made_with=(tokenizer,),
            dated=chat.dated,
        )


def _parser_of(
    *,
    prompt_column: str,
    prompt_template: str | None,
    as_chat: bool,
    hh_as_chat: bool,
    system_prompt: str | None,
    column_patterns: dict[str, str] | None,
) -> Callable[..., PromptParser]:
    return partial(
        PromptParser,
        column=prompt_column,
        template=PromptTemplate(prompt_template) if prompt_template is not None else None,
        as_chat=as_chat,
        hh_as_chat=hh_as_chat,
        system_prompt=system_prompt,
        patterns=tuple(ColumnPattern(*item) for item in (column_patterns or {}).items()),
    )


def tokenize_drafts(
    tokenizer: PreTrainedTokenizerBase, drafts: Sequence[PromptDraft]
) -> list[PromptRow | BadRow]:
    """Tokenise prompts that were parsed; their images and videos are still to be read.

    A column that a row lacks is None, so that rewards get the same of rows and of a table.
    """
    every = dict.fromkeys(name for draft in drafts for name in draft.columns)
    tokens = tokenize_prompts(tokenizer, [draft.text for draft in drafts])
    return [
        PromptRow(
            input_ids=ids,
            deferred=DeferredMedia(draft.text, draft.refs) if draft.refs else None,
            prompt=draft.prompt,
            columns={**every, **draft.columns},
        )
        for draft, ids in zip(drafts, tokens, strict=True)
    ]


def _key(row: PromptRow) -> str:
    """Tell prompts apart: by their text, and by what they show."""
    prompt = row.prompt
    if not isinstance(prompt, str):
        prompt = json.dumps([dict(message) for message in prompt], sort_keys=True, default=str)
    return prompt if row.deferred is None else f"{prompt}\n{row.deferred.refs.key}"


def _without_duplicates(split: Split[PromptRow], what: str) -> Split[PromptRow]:
    first = {_key(row.value): row for row in reversed(split.rows)}
    rows = [row for row in split.rows if first[_key(row.value)] is row]
    left_out = len(split.rows) - len(rows)
    logger.info("left out %d rows of the %s data whose prompt came before", left_out, what)
    return replace(split, rows=rows)
