"""Answers whose steps are labelled one by one, for process reward models."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L

from lrlhf.datamodules.core import RowKind
from lrlhf.datamodules.loading.sources import Data
from lrlhf.datamodules.loading.validation import Validation
from lrlhf.datamodules.rows.step_rows import (
    StepDraft,
    StepParser,
    StepRow,
    collate_steps,
    tokenize_steps,
)
from lrlhf.datamodules.text import TextDataModule, of_module
from lrlhf.models import STEP_SEPARATOR
from lrlhf.types import StepBatch


class StepwiseDataModule(TextDataModule[StepRow, StepBatch]):
    """Loads answers in labelled steps for `lrlhf.modules.ProcessRewardModel`.

    A row has a ``prompt`` (text, or the turns of a chat), ``completions``, the list of the steps of
    an answer, and ``labels``, one for each: true or 1 for a correct step, false or 0 for a wrong
    one, a probability between, or null for a step that nobody has judged. Sources are those of
    `PreferenceDataModule`.

    Prompt and steps are tokenised one by one, and behind each step comes the module's
    ``step_separator``, at whose last token the step is judged. Rows with equal prompts are never
    in different splits.

    Args:
        train: One source, a list of them, or rows; `Weighted` entries give each a share of an
            epoch.
        val: Validation data of its own, every row of which is kept: as ``train``, or several sets
            by their names, see `ValidationSet`.
        prompt_column: Column with the prompt.
        steps_column: Column with the list of steps.
        labels_column: Column with the list of labels.
        as_chat: Make plain prompts the user's turn of a chat.
        system_prompt: First turn of chats that have none of this role, nor a column ``system`` or
            ``system_prompt``.
        step_separator: Text behind each step; None: the module's.
        max_tokens: Longer rows are left out and counted, never cut.
        **options: Those of `TextDataModule` (tokenizer, chat template, tools) and `RowDataModule`
            (batch sizes, held-out rows, order, workers).
    """

    def __init__(  # noqa: PLR0913 - the constructor is the schema of the config
        self,
        train: Data,
        val: Validation | None = None,
        *,
        prompt_column: str = "prompt",
        steps_column: str = "completions",
        labels_column: str = "labels",
        as_chat: bool = False,
        system_prompt: str | None = None,
        step_separator: str | None = None,
        max_tokens: int | None = None,
        **options: Any,
    ) -> None:
        if step_separator == "":
            raise ValueError("step_separator is empty; it must be text behind each step")
        self._row_options: dict[str, Any] = {
            "prompt_column": prompt_column,
            "steps_column": steps_column,
            "labels_column": labels_column,
            "as_chat": as_chat,
            "system_prompt": system_prompt,
        }
        super().__init__(self._answers, train, val, row_options=self._row_options, **options)
        self._separator = step_separator
        self._max_tokens = max_tokens

    def _answers(
        self, trainer: L.Trainer | None, **changed: Any
    ) -> RowKind[StepDraft, StepRow, StepBatch]:
        tokenizer, chat, media = self.reader(trainer)
        own = of_module(trainer, "step_separator")
        if None not in (self._separator, own) and self._separator != own:
            raise ValueError(
                f"data.step_separator is {self._separator!r}, and the model's is {own!r}: leave "
                "the data's out"
            )
        separator = self._separator or own or STEP_SEPARATOR
        media = media.limited(self._max_tokens, "max_tokens")
        return RowKind(
            parse=StepParser(chat, **{**self._row_options, **changed}),
            reached=lambda draft: draft.reached,
            constants=chat.constants,
            finish=lambda drafts: media.check(tokenize_steps(tokenizer, drafts, separator)),
            collate=partial(collate_steps, pad_token_id=int(tokenizer.pad_token_id)),
            keys=lambda row: (row.key,),
            texts=lambda draft: (draft.prompt.text, *draft.steps),
            placed=lambda row, place: replace(row, place=place),
            cost=lambda row: len(row.input_ids),
            tokenizer=tokenizer,
            made_with=(tokenizer, separator),
            dated=chat.dated,
        )
