"""Prompts for on-policy training."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules.core import LoaderOptions, RowDataModule, RowKind
from lrlhf.datamodules.datasets.pretraining import DEFAULT_TEXT_COLUMN, PretrainingTexts
from lrlhf.datamodules.loading.attached import ReaderOptions, data_ranks
from lrlhf.datamodules.loading.sources import Source, Weighted
from lrlhf.datamodules.loading.splits import Split, ValidationData
from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.collate import PromptCollator, PromptRow
from lrlhf.datamodules.rows.media_rows import Unread
from lrlhf.datamodules.rows.prompt_rows import (
    DEFAULT_PROMPT_COLUMN,
    ColumnPattern,
    PromptDraft,
    PromptParser,
    PromptTemplate,
)
from lrlhf.datamodules.rows.tokenizing import tokenize_prompts
from lrlhf.media import MediaOptions
from lrlhf.types import PromptBatch

logger = logging.getLogger(__name__)


class PromptDataModule(RowDataModule[PromptRow, PromptBatch]):
    r"""Loads prompts; every other column of a row is passed on to the rewards.

    A source is a file (.jsonl, .json, .parquet, .csv, each optionally .gz), a folder or pattern of
    such files, a hub id (``owner/name:config@split``), or a `Source` such as `ReasoningGym`.

    A prompt is text, or a list of messages that the chat template renders. In whole dialogues
    (columns ``messages`` and ``conversations``) the last assistant turn is left out and passed on
    as ``reference``. Preference rows (columns ``chosen`` and ``rejected``, as in HH-RLHF) give the
    prompt that both answers share, and the better one as ``reference``. A row's ``tools`` and
    ``chat_template_kwargs`` reach the template.

    A vision-language model is shown what the parts of messages (``{"type": "image", "image": …}``)
    and the columns ``image``, ``images``, ``video`` and ``videos`` hold: paths, bytes, ``data:``
    URIs, pixels. They are read when a row comes into a batch; rewards get them as ``images`` and
    ``videos``.

    Args:
        train: One source or a list of them; `Weighted` entries give each a share of an epoch.
        val: Validation data of its own; every row is kept.
        batch_size: Prompts per step and rank.
        val_batch_size: Prompts per validation batch and rank; None: as ``batch_size``.
        tokenizer: Model folder, hub id or tokenizer; None: the LightningModule's.
        prompt_column: Column with the prompt.
        prompt_template: A jinja2 template over the columns that makes the prompt instead, such as
            ``"5 + 3 = 8\n{{ metadata.expression }} ="``.
        as_chat: Make a plain text prompt the user's turn of a chat.
        hh_as_chat: Make the shared ``Human: … Assistant: …`` transcript of a pair a chat.
        system_prompt: System turn of every chat that has none.
        chat_template: File or text of a template to use instead of the tokenizer's.
        chat_template_kwargs: Passed to the template, such as ``{enable_thinking: false}``.
        tools: Tool descriptions for rows that have none of their own.
        column_patterns: Regular expressions that cut a column down to what they find, by column:
            ``{answer: "####\\s*(.+)"}``, or ``{"answer -> gold": …}`` for a new column. The first
            group counts.
        max_prompt_tokens: Rows with longer prompts are left out and counted, never cut.
        val_fraction: Share of the rows to hold out for validation when ``val`` is not given. Rows
            with equal prompts never stand in both splits.
        val_size: Number of rows to hold out instead.
        deduplicate: Keep only the first of the rows with equal prompts.
        pretraining: Texts of a second stream that goes into the policy's loss (PTX): sources as
            for ``train``, whose rows have a plain text, or whole dialogues in ``messages`` or
            ``conversations`` that the chat template renders. Every train batch carries some.
        pretraining_batch_size: Texts per step and rank; None: as ``batch_size``.
        pretraining_column: Column with the text, or with messages.
        pretraining_max_tokens: Longer texts are left out and counted, never cut.
        media: How images and videos are read.
        max_bad_fraction: Stop when a larger share of the rows cannot be used.
        seed: Of the order and of the held-out rows.
        num_workers: Processes that read images and videos and collate; text rows are tokenised
            once, so 0 is fast for them.
        pin_memory: None: where there is a GPU.
        accept_changed_data: Resume although the train data (or the tokenizer) is not what it was
            when the checkpoint was written; else that stops the run.
    """

    def __init__(  # noqa: PLR0913 - the constructor is the schema of the config
        self,
        train: str | Source | list[str | Source | Weighted],
        val: str | Source | list[str | Source | Weighted] | None = None,
        *,
        batch_size: int = 8,
        val_batch_size: int | None = None,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        prompt_column: str = DEFAULT_PROMPT_COLUMN,
        prompt_template: str | None = None,
        as_chat: bool = False,
        hh_as_chat: bool = False,
        system_prompt: str | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        column_patterns: dict[str, str] | None = None,
        max_prompt_tokens: int | None = None,
        val_fraction: float = 0.0,
        val_size: int = 0,
        deduplicate: bool = False,
        pretraining: str | Source | list[str | Source | Weighted] | None = None,
        pretraining_batch_size: int | None = None,
        pretraining_column: str = DEFAULT_TEXT_COLUMN,
        pretraining_max_tokens: int = 1024,
        media: MediaOptions = MediaOptions(),  # noqa: B008  frozen
        max_bad_fraction: float = 0.01,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        accept_changed_data: bool = False,
    ) -> None:
        super().__init__(
            self._prompts,
            train,
            validation=ValidationData(val, val_size, val_fraction, seed),
            options=LoaderOptions(
                batch_size=batch_size,
                val_batch_size=val_batch_size,
                seed=seed,
                num_workers=num_workers,
                pin_memory=pin_memory,
                max_bad_fraction=max_bad_fraction,
                accept_changed_data=accept_changed_data,
            ),
            besides=pretraining,
        )
        self._reader = ReaderOptions(
            tokenizer,
            chat_template,
            chat_template_kwargs,
            tools,
            media,
            (max_prompt_tokens, "max_prompt_tokens"),
        )
        self._max_tokens = max_prompt_tokens
        self._parser = partial(
            PromptParser,
            column=prompt_column,
            template=PromptTemplate(prompt_template) if prompt_template is not None else None,
            as_chat=as_chat,
            hh_as_chat=hh_as_chat,
            system_prompt=system_prompt,
            patterns=tuple(ColumnPattern(*item) for item in (column_patterns or {}).items()),
        )
        self._deduplicate = deduplicate
        self._pretraining: PretrainingTexts | None = None
        if pretraining is not None:
            self._pretraining = PretrainingTexts(
                pretraining,
                column=pretraining_column,
                batch_size=batch_size if pretraining_batch_size is None else pretraining_batch_size,
                max_tokens=pretraining_max_tokens,
                max_bad_fraction=max_bad_fraction,
                seed=seed,
            )

    def _prompts(self, trainer: L.Trainer | None) -> RowKind[PromptDraft, PromptRow, PromptBatch]:
        reader = self._reader.attach(trainer)
        tokenizer, chat, media = reader
        companion = None
        if self._pretraining is not None:
            companion = partial(self._pretraining.stream, reader, data_ranks(trainer))
        return RowKind(
            parse=self._parser(chat, media=media),
            finish=lambda drafts: media.check(self._tokenize(tokenizer, drafts)),
            collate=PromptCollator(int(tokenizer.pad_token_id)),
            keys=lambda row: (_key(row),),
            check=_without_duplicates if self._deduplicate else lambda split, _: split,
            read=media,
            companion=companion,
            tokenizer=tokenizer,
            made_with=(tokenizer,),
            dated=chat.dated,
        )

    def _tokenize(
        self, tokenizer: PreTrainedTokenizerBase, drafts: Sequence[PromptDraft]
    ) -> list[PromptRow | BadRow]:
        rows: list[PromptRow | BadRow] = []
        tokens = tokenize_prompts(tokenizer, [draft.text for draft in drafts])
        for draft, ids in zip(drafts, tokens, strict=True):
            if self._max_tokens is not None and len(ids) > self._max_tokens:
                rows.append(
                    BadRow(
                        "too long",
                        f"the prompt has {len(ids)} tokens, max_prompt_tokens={self._max_tokens}",
                        remedy="raise max_prompt_tokens",
                    )
                )
            else:
                unread = Unread(draft.text, draft.refs) if draft.refs else None
                rows.append(PromptRow(draft.prompt, ids, draft.columns, unread))
        return rows


def _key(row: PromptRow) -> str:
    """Tell prompts apart: by their text, and by what they show."""
    prompt = row.prompt
    if not isinstance(prompt, str):
        prompt = json.dumps([dict(message) for message in prompt], sort_keys=True, default=str)
    return prompt if row.unread is None else f"{prompt}\n{row.unread.refs.key}"


def _without_duplicates(split: Split[PromptRow], what: str) -> Split[PromptRow]:
    first = {_key(row.value): row for row in reversed(split.rows)}
    rows = [row for row in split.rows if first[_key(row.value)] is row]
    left_out = len(split.rows) - len(rows)
    logger.info("left out %d rows of the %s data whose prompt came before", left_out, what)
    return replace(split, rows=rows)
