"""Answers that are desirable or not, each by itself."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L

from lrlhf.datamodules.core import RowKind
from lrlhf.datamodules.loading.sources import Data
from lrlhf.datamodules.loading.validation import Validation
from lrlhf.datamodules.rows.unpaired_rows import (
    UnpairedDraft,
    UnpairedParser,
    UnpairedRow,
    collate_unpaired,
    labelled,
    with_others,
)
from lrlhf.datamodules.supervised import text_kind
from lrlhf.datamodules.text import TextDataModule, of_module
from lrlhf.types import UnpairedBatch


class UnpairedPreferenceDataModule(TextDataModule[UnpairedRow, UnpairedBatch]):
    """Loads labelled answers for `lrlhf.modules.KTO`.

    Sources are those of `PreferenceDataModule`: files, folders, hub ids, or rows from Python. Rows
    come as

    - ``prompt`` and ``completion``, text or turns, and ``label``: true for a desirable answer;
    - ``messages`` (or ``conversations``) and ``label``: the answer is the last turn;
    - ``chosen`` and ``rejected``, with or without their ``prompt``: two rows, true and false.

    Texts end, and images, videos and audio are found, as in `SupervisedDataModule`; answers show
    nothing. Each row gets a mismatched pair for the reference point of KTO, its prompt with the
    answer to another one: of all rows, ordered by prompt, the one that follows at a fixed
    distance. So neither order, batches nor ranks change the pairs. A pair that is longer than the
    longest row is left out. Rows with equal prompts are never in different splits.

    Args:
        train: One source, a list of them, or rows; `Weighted` entries give each a share of an
            epoch.
        val: Validation data of its own, every row of which is kept: as ``train``, or several sets
            by their names, see `ValidationSet`.
        label_column: Column with the label.
        messages_column: Column with the turns.
        prompt_column: Column with the prompt.
        completion_column: Column with the answer.
        chosen_column: Column with the desirable answer of a pair.
        rejected_column: Column with the undesirable answer of a pair.
        as_chat: Make plain prompts and answers the turns of a chat.
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
        self._label_options: dict[str, Any] = {
            "label_column": label_column,
            "chosen_column": chosen_column,
            "rejected_column": rejected_column,
        }
        self._text_options: dict[str, Any] = {
            "messages_column": messages_column,
            "prompt_column": prompt_column,
            "completion_column": completion_column,
            "as_chat": as_chat,
            "system_prompt": system_prompt,
        }
        row_options = self._label_options | self._text_options
        super().__init__(self._answers, train, val, row_options=row_options, **options)
        self._max_tokens = max_tokens

    def _answers(
        self, trainer: L.Trainer | None, **changed: Any
    ) -> RowKind[UnpairedDraft, UnpairedRow, UnpairedBatch]:
        labels = {name: changed.pop(name, own) for name, own in self._label_options.items()}
        options = {**self._text_options, **changed, "loss_on": "completion"}
        kind: Any = text_kind(self, trainer, self._max_tokens, **options)
        parser = UnpairedParser(kind.parse, **labels)
        marks, needed = kind.read.placeholders, of_module(trainer, "estimates_kl") is not False
        return replace(
            kind,
            parse=parser,
            expand=parser.expand,
            finish=lambda drafts: labelled(drafts, kind.finish(drafts), marks),
            collate=partial(collate_unpaired, pad_token_id=int(kind.tokenizer.pad_token_id)),
            check=partial(with_others, needed=needed),
        )
