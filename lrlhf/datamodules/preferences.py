"""Pairs of answers for reward modelling."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
from lightning.fabric.utilities.rank_zero import rank_zero_only
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules.core import LoaderOptions, RowDataModule, RowKind
from lrlhf.datamodules.loading.attached import ReaderOptions, resolve_heads
from lrlhf.datamodules.loading.sources import Source, Weighted
from lrlhf.datamodules.loading.splits import Split, ValidationData
from lrlhf.datamodules.rows.bad_rows import BadDataError
from lrlhf.datamodules.rows.collate import PairRow, PreferenceCollator
from lrlhf.datamodules.rows.pair_tokens import tokenize_pairs
from lrlhf.datamodules.rows.preference_labels import LabelReader, MarginReader
from lrlhf.datamodules.rows.preference_rows import PairDraft, PreferenceParser
from lrlhf.datamodules.rows.prompt_rows import PromptTemplate
from lrlhf.media import MediaOptions
from lrlhf.types import PreferenceBatch

logger = logging.getLogger(__name__)


class PreferenceDataModule(RowDataModule[PairRow, PreferenceBatch]):
    """Loads pairs of answers with the judgement which of them is better.

    A source is a file (.jsonl, .json, .parquet, .csv, each optionally .gz), a folder or pattern of
    such files, a hub id (``owner/name:config@split``), or a `Source` such as `RatedFile`.

    Rows come as

    - ``prompt``, ``chosen``, ``rejected``: text, or messages that the chat template renders; a
      prompt that the other two begin with, as in UltraFeedback, counts once;
    - ``chosen`` and ``rejected`` that begin with the same prompt: messages, transcripts as in
      HH-RLHF, or text;
    - ``candidate0``, ``candidate1`` and a label per head: A, B or C (equal), see `LabelReader`;
    - ``chosen_ids``, ``rejected_ids``: token ids of prompt and answer;
    - ``image_0``, ``image_1`` (also ``images_…``, ``video_…``, ``videos_…``) with a label per head,
      or ``image_chosen``, ``image_rejected``: candidates that are shown to a vision-language model,
      beside the ``prompt`` or under an ``instruction``.

    Answers to a prompt that shows something have it in the parts of their messages, or in the
    columns ``image``, ``images``, ``video`` and ``videos``.

    Plain text ends with the tokenizer's end-of-sequence token. A row's ``margin`` says by how much
    the better answer should win. All other columns end up in the batch's ``info``.

    Args:
        train: One source or a list of them; `Weighted` entries give each a share of an epoch.
        val: Validation data of its own; every row is kept.
        batch_size: Pairs per step and rank.
        val_batch_size: Pairs per validation batch and rank; None: as ``batch_size``.
        tokenizer: Model folder, hub id or tokenizer; None: the LightningModule's.
        head_names: Heads in the order of ``labels``; None: the LightningModule's.
        label_columns: For each head the column with its label.
        prompt_column: Column with the prompt.
        chosen_column: Column with the better answer.
        rejected_column: Column with the worse answer.
        margin_column: Column with the margin, where there is one; null: it is a column like any.
        score_columns: Columns with the scores of the better and the worse answer, such as
            ``[chosen_score, rejected_score]``: their difference is the margin of a row without
            one. A negative difference makes a bad row.
        as_chat: Make plain prompts and answers the turns of a chat.
        hh_as_chat: Make ``Human: … Assistant: …`` transcripts the turns of a chat; else they are
            kept as they are.
        chat_template: File or text of a template to use instead of the tokenizer's.
        chat_template_kwargs: Passed to the template.
        tools: Tool descriptions for rows that have none of their own.
        instruction: A jinja2 template over the columns, for the system turn of pairs of images or
            videos, which are then shown alone: ``"Rate this picture of: {{ prompt }}"``.
        media: How images and videos are read.
        max_tokens: Pairs with a longer candidate are left out and counted, never cut.
        val_fraction: Share of the rows to hold out for validation when ``val`` is not given. Rows
            with equal prompts (or, without a prompt, equal texts) never stand in both splits.
        val_size: Number of rows to hold out instead.
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
        head_names: list[str] | None = None,
        label_columns: dict[str, str] | None = None,
        prompt_column: str = "prompt",
        chosen_column: str = "chosen",
        rejected_column: str = "rejected",
        margin_column: str | None = "margin",
        score_columns: tuple[str, str] | None = None,
        as_chat: bool = False,
        hh_as_chat: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        instruction: str | None = None,
        media: MediaOptions = MediaOptions(),  # noqa: B008  frozen
        max_tokens: int | None = None,
        val_fraction: float = 0.0,
        val_size: int = 0,
        max_bad_fraction: float = 0.01,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        accept_changed_data: bool = False,
    ) -> None:
        super().__init__(
            self._pairs,
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
        )
        self._reader = ReaderOptions(
            tokenizer,
            chat_template,
            chat_template_kwargs,
            tools,
            media,
            (max_tokens, "max_tokens"),
        )
        self._max_tokens = max_tokens
        self._given_heads = head_names
        self._heads: tuple[str, ...] = ()
        self._label_columns = dict(label_columns or {})
        self._parser = partial(
            PreferenceParser,
            prompt_column=prompt_column,
            chosen_column=chosen_column,
            rejected_column=rejected_column,
            margins=MarginReader(margin_column, score_columns),
            as_chat=as_chat,
            hh_as_chat=hh_as_chat,
            instruction=None if instruction is None else PromptTemplate(instruction),
        )

    @property
    def head_names(self) -> tuple[str, ...]:
        """The heads in the order of the labels; known after `setup`."""
        return self._heads

    def _pairs(self, trainer: L.Trainer | None) -> RowKind[PairDraft, PairRow, PreferenceBatch]:
        tokenizer, chat, media = self._reader.attach(trainer)
        self._heads = heads = resolve_heads(self._given_heads, trainer)
        return RowKind(
            parse=self._parser(
                chat,
                LabelReader(heads, self._label_columns),
                vocabulary=len(tokenizer),
                media=media,
            ),
            finish=lambda drafts: media.check(
                tokenize_pairs(tokenizer, drafts, max_tokens=self._max_tokens)
            ),
            collate=PreferenceCollator(int(tokenizer.pad_token_id)),
            keys=lambda row: row.keys,
            check=partial(_check, heads),
            read=media,
            cost=_pair_tokens,
            tokenizer=tokenizer,
            made_with=(tokenizer, heads),
            dated=chat.dated,
        )


def _check(heads: Sequence[str], split: Split[PairRow], what: str) -> Split[PairRow]:
    without = [row for row in split.rows if row.value.margin is None]
    if 0 < len(without) < len(split.rows):
        raise BadDataError(
            f"{len(without)} of {len(split.rows)} rows of the {what} data have no margin, the "
            f"first is {without[0].place}: give every row one (also in the other sources), or "
            "set margin_column to null to ignore margins"
        )
    if split.rows and not without:
        _log_margins([row.margin for row in split.values if row.margin is not None], what)
    for index, head in enumerate(heads if what == "train" else ()):
        if all(math.isnan(row.labels[index]) for row in split.values):
            columns = sorted({column for row in split.values for column in row.info})
            raise BadDataError(
                f"no train row has a label for the head {head!r}, so it would never be "
                f"trained (columns: {', '.join(columns)}): name its column in "
                "`label_columns`, or leave the head out of head_names"
            )
    return split


@rank_zero_only
def _log_margins(margins: Sequence[float], what: str) -> None:
    mean = math.fsum(margins) / len(margins)
    logger.info("the %s rows have margins: mean %.3g, largest %.3g", what, mean, max(margins))


def _pair_tokens(row: PairRow) -> int | None:
    """Tokens to compute for a pair, the prompt of both candidates once."""
    if any(text.unread for text in row.texts):
        return None  # how long an image or video is, is known once it is read
    first, second = row.candidate0, row.candidate1
    return len(first.input_ids) + len(second.input_ids) - min(first.start, second.start)
