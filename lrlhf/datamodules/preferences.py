"""Pairs of answers for reward modelling."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lrlhf.datamodules.core import RowKind
from lrlhf.datamodules.loading.sources import Data, distinct_names
from lrlhf.datamodules.loading.splits import Split
from lrlhf.datamodules.loading.validation import Validation, title_of
from lrlhf.datamodules.rows.bad_rows import BadDataError
from lrlhf.datamodules.rows.chat import ChatFormat, Endings
from lrlhf.datamodules.rows.collate import PairRow, collate_pairs, with_place
from lrlhf.datamodules.rows.media_rows import MediaReader
from lrlhf.datamodules.rows.preference_rows import (
    LabelReader,
    MarginReader,
    PairDraft,
    PreferenceParser,
    tokenize_pairs,
)
from lrlhf.datamodules.rows.prompt_rows import PromptTemplate
from lrlhf.datamodules.text import TextDataModule, of_module
from lrlhf.types import PreferenceBatch

logger = logging.getLogger(__name__)

MOST_SOURCES = 32
"""Sources that have metrics of their own, at most: each adds several."""


class PreferenceDataModule(TextDataModule[PairRow, PreferenceBatch]):
    """Loads pairs of answers with the judgement which of them is better.

    A source is a file (.jsonl, .json, .parquet, .csv, each optionally .gz), a folder or pattern of
    such files, a hub id (``owner/name:config@split``), or a `Source`.
    From Python it may also be rows: a list of dicts, a dict of columns, a DataFrame, a
    ``datasets.Dataset`` or any other object with a length, see `MemorySource`.

    Rows come as

    - ``prompt``, ``chosen``, ``rejected``: text, or messages that the chat template renders; a
      prompt that the other two begin with, as in UltraFeedback, counts once;
    - ``chosen`` and ``rejected`` that begin with the same prompt: messages, transcripts as in
      HH-RLHF, or text;
    - ``candidate0``, ``candidate1`` and a label per head: A, B or C (equal), see `LabelReader`;
    - ``image_0``, ``image_1`` (also ``images_…``, ``video_…``, ``videos_…``, ``audio_…``,
      ``audios_…``) with a label per head, or ``image_chosen``, ``image_rejected``: candidates that
      are shown to a multimodal model, beside the ``prompt`` or under an ``instruction``.

    Answers to a prompt that shows something have it in the parts of their messages, or in the
    columns ``image``, ``images``, ``video``, ``videos``, ``audio`` and ``audios``.

    Plain text ends with the tokenizer's end-of-sequence token. A row's ``margin`` says by how much
    the better answer should win. All other columns end up in the batch's ``info``.

    Args:
        train: One source, a list of them, or rows; `Weighted` entries give each a share of an
            epoch.
        val: Validation data of its own, every row of which is kept: as ``train``, or several sets
            by their names, see `ValidationSet`.
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
        instruction: A jinja2 template over the columns, for the system turn of pairs of images,
            videos or audio, which are then shown alone: ``"Rate this picture of: {{ prompt }}"``.
        max_tokens: Pairs with a longer candidate are left out and counted, never cut.
        **options: Those of `TextDataModule` (tokenizer, chat template, tools, media) and
            `RowDataModule` (batch sizes, held-out rows, order, workers).
    """

    def __init__(  # noqa: PLR0913 - the constructor is the schema of the config
        self,
        train: Data,
        val: Validation | None = None,
        *,
        head_names: list[str] | None = None,
        label_columns: dict[str, str] | None = None,
        prompt_column: str = "prompt",
        chosen_column: str = "chosen",
        rejected_column: str = "rejected",
        margin_column: str | None = "margin",
        score_columns: tuple[str, str] | None = None,
        as_chat: bool = False,
        hh_as_chat: bool = False,
        instruction: str | None = None,
        max_tokens: int | None = None,
        **options: Any,
    ) -> None:
        self._row_options: dict[str, Any] = {
            "label_columns": label_columns,
            "prompt_column": prompt_column,
            "chosen_column": chosen_column,
            "rejected_column": rejected_column,
            "margin_column": margin_column,
            "score_columns": score_columns,
            "as_chat": as_chat,
            "hh_as_chat": hh_as_chat,
            "instruction": instruction,
        }
        _parser_of(**self._row_options)  # what cannot be read is refused at once
        super().__init__(self._pairs, train, val, row_options=self._row_options, **options)
        self._max_tokens = max_tokens
        self._chosen_heads = head_names
        self._heads: tuple[str, ...] = ()
        self._sources: dict[str | None, tuple[Split[PairRow], Mapping[str, str]]] = {}

    @property
    def head_names(self) -> tuple[str, ...]:
        """The heads in the order of the labels; known after `setup`."""
        return self._heads

    def source_names(self, val: str | None = None) -> Mapping[str, str]:
        """Return what metrics call each value of the rows' column ``source``.

        In a mixture a row has the name of its entry there, unless it has such a column.

        Args:
            val: Of this validation set; None: of the train rows.

        Returns:
            Names by value, in the order of the data; empty where all rows have the same, or where
            there are more than `MOST_SOURCES`.
        """
        if self._splits is None:  # a step that is taken again has no data
            return {}
        train, held_out = self._splits
        split = train if val is None else held_out[val]
        if split is not self._sources.get(val, (None, {}))[0]:
            self._sources[val] = split, _source_names(split, val)
        return self._sources[val][1]

    def _pairs(
        self, trainer: L.Trainer | None, **changed: Any
    ) -> RowKind[PairDraft, PairRow, PreferenceBatch]:
        tokenizer, chat, media = self.reader(trainer)
        media = media.limited(self._max_tokens, "max_tokens")
        heads = (
            of_module(trainer, "head_names") if self._chosen_heads is None else self._chosen_heads
        )
        self._heads = heads = ("reward",) if heads is None else tuple(heads)
        if not heads or len(set(heads)) < len(heads):
            raise ValueError(f"head_names={list(heads)!r}: give at least one name, each only once")
        parser = _parser_of(**{**self._row_options, **changed})(heads, chat, media)
        answers_only = bool(of_module(trainer, "answers_only"))
        stops = of_module(trainer, "end_token_ids") or ()
        endings = Endings(tokenizer, stops) if answers_only else None
        return RowKind(
            parse=replace(parser, answers_only=answers_only),
            reached=lambda draft: draft.reached,
            constants=chat.constants,
            finish=lambda drafts: media.check(tokenize_pairs(tokenizer, drafts, endings)),
            collate=partial(collate_pairs, pad_token_id=int(tokenizer.pad_token_id)),
            keys=lambda row: row.keys,
            texts=lambda draft: (text.text for text in draft.pair.candidates),
            notes=endings.notes if endings is not None else lambda _: (),
            placed=with_place,
            check=partial(_check, heads),
            read=media,
            cost=_pair_tokens,
            tokenizer=tokenizer,
            made_with=(tokenizer, heads, answers_only),
            dated=chat.dated,
        )


def _parser_of(
    *,
    label_columns: dict[str, str] | None,
    margin_column: str | None,
    score_columns: tuple[str, str] | None,
    instruction: str | None,
    **columns: Any,
) -> Callable[[Sequence[str], ChatFormat, MediaReader], PreferenceParser]:
    margins = MarginReader(margin_column, score_columns)
    template = None if instruction is None else PromptTemplate(instruction)
    return lambda heads, chat, media: PreferenceParser(
        chat,
        LabelReader(heads, label_columns or {}),
        margins=margins,
        media=media,
        instruction=template,
        **columns,
    )


def _source_names(split: Split[PairRow], val: str | None) -> Mapping[str, str]:
    names = dict.fromkeys(str(row.info["source"]) for row in split.values if "source" in row.info)
    if len(names) > MOST_SOURCES:
        rank_zero_only(logger.info)(
            "the column source of the %s rows has %d values: metrics do not tell them apart",
            "train" if val is None else title_of(val),
            len(names),
        )
    return distinct_names(names) if 1 < len(names) <= MOST_SOURCES else {}


def _check(heads: Sequence[str], split: Split[PairRow], what: str) -> Split[PairRow]:
    without = [row for row in split.rows if row.value.margin is None]
    if 0 < len(without) < len(split.rows):
        raise BadDataError(
            f"{len(without)} of {len(split.rows)} rows of the {what} data have no margin, the "
            f"first is {without[0].place}: give every row one (also in the other sources), or "
            "set margin_column to null to ignore margins"
        )
    for index, head in enumerate(heads if what == "train" else ()):
        if all(math.isnan(row.labels[index]) for row in split.values):
            columns = sorted({column for row in split.values for column in row.info})
            raise BadDataError(
                f"no train row has a label for the head {head!r}, so it would never be "
                f"trained (columns: {', '.join(columns)}): name its column in "
                "`label_columns`, or leave the head out of head_names"
            )
    return split


def _pair_tokens(row: PairRow) -> int | None:
    """Tokens to compute for a pair, the prompt of both candidates once."""
    if any(text.deferred for text in row.texts):
        return None  # how long an image or video is, is known once it is read
    first, second = row.texts
    return len(first.input_ids) + len(second.input_ids) - min(first.start, second.start)
