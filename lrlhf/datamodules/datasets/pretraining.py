"""Texts of a second stream, which goes into the policy's loss beside what it learns from rewards.

Ouyang et al. 2022 call it PTX, https://arxiv.org/abs/2203.02155
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules.core import RowKind
from lrlhf.datamodules.loading.loader import EpochOrder, Ranks, Rows
from lrlhf.datamodules.loading.sources import Entries, Fetching, Row
from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.chat import ChatFormat, Text, read_messages, tokenize, with_system
from lrlhf.datamodules.rows.collate import Candidate, right_padded
from lrlhf.datamodules.rows.columns import text_of, with_turns
from lrlhf.datamodules.rows.conservation import Reached
from lrlhf.datamodules.rows.media_rows import DeferredMedia, MediaReader
from lrlhf.datamodules.rows.prompt_rows import column_or_dialogue
from lrlhf.datamodules.text import Reader
from lrlhf.types import PromptBatch, SequenceBatch

DEFAULT_TEXT_COLUMN = "text"

TextRow = Candidate
"""A tokenised text; all of it but the first token, which nothing predicts, is trained on."""


@dataclass(frozen=True)
class PretrainingTexts:
    """Where the texts come from, and which can be used; options as in `PromptDataModule`."""

    sources: Entries
    column: str
    batch_size: int
    max_tokens: int
    max_bad_fraction: float
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"pretraining_batch_size={self.batch_size}: give at least 1")
        if self.max_tokens < 2:
            raise ValueError(
                f"pretraining_max_tokens={self.max_tokens}: give at least 2, as the first token of "
                "a text is not trained on"
            )

    def stream(
        self, reader: Reader, ranks: Ranks, refuse: Callable[..., None] | None = None
    ) -> PretrainingStream:
        """Load and tokenise every text; bad rows are counted and logged.

        Args:
            reader: Of texts.
            ranks: That share them.
            refuse: Refuses rows that the models cannot read, see `refuse_unreadable`.

        Raises:
            BadDataError: Too many rows are bad.
            ValueError: There are fewer texts than one batch of all ranks takes.
        """
        tokenizer, chat, media = reader
        passages = ", or cut the texts into passages"
        media = media.limited(self.max_tokens, "pretraining_max_tokens", passages)
        kind = RowKind[DeferredMedia, TextRow, SequenceBatch](
            parse=TextParser(chat, self.column, media),
            reached=_reached,
            constants=chat.constants,
            finish=lambda texts: media.check(_tokenize(tokenizer, texts)),
            texts=lambda draft: (draft.text.text,),
            collate=partial(right_padded, pad_token_id=int(tokenizer.pad_token_id)),
        )
        texts = kind.load(self.sources, "pretraining", self.max_bad_fraction)
        if refuse is not None:
            refuse(texts.rows, tokenizer, training=True, answered=False)
        # another seed: else texts and prompts of equal number would always meet the same way
        seed = int(np.random.SeedSequence([self.seed, 2]).generate_state(1)[0])
        fetching = Fetching(kind.collate, read=media)
        return PretrainingStream(
            texts.values, texts.order(seed), self.batch_size, fetching=fetching, ranks=ranks
        )


def _reached(draft: DeferredMedia) -> Reached:
    text = draft.text
    return Reached(text.text, text.text, repr(draft.refs), rendered=text.complete)


def _tokenize(
    tokenizer: PreTrainedTokenizerBase, drafts: Sequence[DeferredMedia]
) -> list[TextRow | BadRow]:
    tokens = tokenize(tokenizer, [draft.text for draft in drafts])
    return [
        BadRow("too short", "a text of one token has nothing to predict")
        if len(ids) < 2
        else TextRow(input_ids=ids, start=1, deferred=draft if draft.refs else None)
        for draft, ids in zip(drafts, tokens, strict=True)
    ]


@dataclass(frozen=True)
class TextParser:
    """Reads rows as texts."""

    chat: ChatFormat
    column: str = DEFAULT_TEXT_COLUMN
    media: MediaReader = MediaReader()  # noqa: RUF009  frozen

    def __call__(self, row: Row, folder: Path | None = None) -> DeferredMedia:
        """Parse one row, or raise `BadRow`; relative paths start from ``folder``."""
        row = with_turns(row, self.column)
        column = column_or_dialogue(
            row, self.column, default=DEFAULT_TEXT_COLUMN, setting="pretraining_column"
        )
        refs = self.media.of_columns(row, folder)
        if isinstance(row[column], str):
            (text,) = self.media.of_texts((text_of(row, column),), refs)
            return DeferredMedia(Text(text, complete=False), refs)
        messages = with_system(read_messages(row[column], column), row)
        messages, refs = self.media.of_messages(messages, refs, folder)
        return DeferredMedia(
            Text(self.chat.render(messages, row, prompt=False), complete=True), refs
        )


class PretrainingStream:
    """Adds its texts to each train batch.

    The texts are an endless stream of shuffled epochs, and batch number ``i`` takes the stretch
    from ``i * batch_size * ranks`` on: which texts it gets is a pure function of the seed, ``i``
    and the rank.

    Raises:
        ValueError: There are fewer texts than one batch of all ranks takes.
    """

    def __init__(
        self,
        rows: Sequence[TextRow],
        order: EpochOrder,
        batch_size: int,
        *,
        fetching: Fetching[TextRow, SequenceBatch],
        ranks: Ranks,
    ) -> None:
        self.rows = rows
        self._order = order
        self._batch_size = batch_size
        self._fetching = fetching
        self._ranks = ranks
        self._epoch: tuple[int, Rows] = (0, order.epoch(0))
        if len(rows) < batch_size * ranks.world:
            raise ValueError(
                f"pretraining_batch_size={batch_size} on {ranks.world} rank(s) takes "
                f"{batch_size * ranks.world} texts for one step, and there are "
                f"{len(rows)}: give more texts, or set pretraining_batch_size to "
                f"{max(1, len(rows) // ranks.world)} or less"
            )

    def __call__(self, batch: PromptBatch, number: int) -> PromptBatch:
        """Return ``batch``, which is number ``number`` since the run began, with its texts."""
        texts = self.texts(number)
        # the loader pins what it collates itself
        pinned = batch.input_ids.is_pinned()
        return replace(batch, pretraining=texts.pin_memory() if pinned else texts)

    def texts(self, number: int) -> SequenceBatch:
        """Return the texts of train batch ``number``, counted from 0."""
        first = (number * self._ranks.world + self._ranks.rank) * self._batch_size
        rows = [self._row(position) for position in range(first, first + self._batch_size)]
        return self._fetching.batch(self.rows, rows)

    def _row(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._order))
        if epoch != self._epoch[0]:
            self._epoch = (epoch, self._order.epoch(epoch))
        return int(self._epoch[1][offset])
