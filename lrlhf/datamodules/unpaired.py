"""Answers that are desirable or not, each by itself."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L

from lrlhf.datamodules.core import RowKind
from lrlhf.datamodules.loading.sources import Data
from lrlhf.datamodules.loading.validation import Validation
from lrlhf.datamodules.rows.supervised_rows import SupervisedDraft
from lrlhf.datamodules.rows.unpaired_rows import (
    UnpairedParser,
    UnpairedRow,
    collate_unpaired,
    with_others,
)
from lrlhf.datamodules.supervised import text_kind
from lrlhf.datamodules.text import TextDataModule, of_module
from lrlhf.types import UnpairedBatch


class UnpairedPreferenceDataModule(TextDataModule[UnpairedRow, UnpairedBatch]):
    """Loads labelled answers for `lrlhf.modules.KTO`.

    Rows come, from the sources of `SupervisedDataModule`, as

    - ``prompt`` and ``completion``, text or turns, and ``label``: true for a desirable answer;
    - ``messages`` (or ``conversations``) and ``label``: the answer is the last turn;
    - ``chosen`` and ``rejected``, with or without their ``prompt``: two rows, true and false.

    Each row gets a mismatched pair for the reference point of KTO, its prompt with the answer to
    another one: of all rows, ordered by prompt, the one that follows at a fixed distance. So
    neither order, batches nor ranks change the pairs. A pair that is longer than the longest row,
    or whose answer shows something, is left out.

    Args:
        train: See `SupervisedDataModule`.
        val: See `SupervisedDataModule`.
        label_column: Column with the label.
        messages_column: Column with the turns.
        prompt_column: Column with the prompt.
        completion_column: Column with the answer.
        chosen_column: Column with the desirable answer of a pair.
        rejected_column: Column with the undesirable answer of a pair.
        as_chat: Make plain prompts and answers the turns of a chat.
        system_prompt: See `SupervisedDataModule`.
        max_tokens: Longer rows are left out and counted, never cut.
        **options: See `SupervisedDataModule`.
    """

    def __init__(  # noqa: PLR0913 - the constructor is the schema of the config
        self,
        train: Data,
        val: Validation | None = None,
        *,
        label_column: str = "label",
        messages_column: str = "messages",
        prompt_column: str = "prompt",
        completion_column: str = "completion",
        chosen_column: str = "chosen",
        rejected_column: str = "rejected",
        as_chat: bool = False,
        system_prompt: str | None = None,
        max_tokens: int | None = None,
        **options: Any,
    ) -> None:
        self._row_options: dict[str, Any] = {
            "label_column": label_column,
            "messages_column": messages_column,
            "prompt_column": prompt_column,
            "completion_column": completion_column,
            "chosen_column": chosen_column,
            "rejected_column": rejected_column,
            "as_chat": as_chat,
            "system_prompt": system_prompt,
        }
        super().__init__(self._answers, train, val, row_options=self._row_options, **options)
        self._max_tokens = max_tokens

    def _answers(
        self, trainer: L.Trainer | None, **changed: Any
    ) -> RowKind[SupervisedDraft, UnpairedRow, UnpairedBatch]:
        options = {**self._row_options, **changed}
        kind: Any = text_kind(self, trainer, self._max_tokens, UnpairedParser, **options)
        needed = of_module(trainer, "estimates_kl") is not False
        return replace(
            kind,
            expand=kind.parse.expand,
            collate=partial(collate_unpaired, pad_token_id=int(kind.tokenizer.pad_token_id)),
            check=partial(with_others, marks=kind.read.placeholders, needed=needed),
        )
