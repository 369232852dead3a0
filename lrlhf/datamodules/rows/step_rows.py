"""One row of a stepwise data set: a prompt, the steps of an answer, and a label for each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.rows.bad_rows import BadRow, missing_column
from lrlhf.datamodules.rows.chat import (
    ChatFormat,
    Text,
    read_messages,
    tokenize,
    tokenize_prompts,
    with_system,
)
from lrlhf.datamodules.rows.collate import padded
from lrlhf.datamodules.rows.columns import structure_of, text_of, valid_text, with_turns, wrong_type
from lrlhf.datamodules.rows.conservation import Reached
from lrlhf.datamodules.rows.media_rows import MediaReader, TokenizedText
from lrlhf.datamodules.rows.preference_rows import digest
from lrlhf.models import joined_steps, split_text
from lrlhf.types import StepBatch


@dataclass(frozen=True)
class StepDraft:
    """A row that was read and not yet tokenised."""

    prompt: Text
    steps: tuple[str, ...]
    labels: tuple[float, ...]
    """Of each step; NaN: it has none."""
    key: str
    """Rows that share it belong in the same split."""

    @property
    def reached(self) -> Reached:
        """What of the row the model reads; it learns the labels."""
        steps = "\n".join(self.steps)
        text = self.prompt.text + steps
        return Reached(text, steps, repr(self.labels), rendered=self.prompt.complete)


@dataclass(frozen=True, kw_only=True)
class StepRow(TokenizedText):
    """One tokenised answer."""

    ends: tuple[int, ...]
    """Where each step is judged."""
    labels: tuple[float, ...]
    start: int
    """Where the first step begins."""
    key: str
    place: str = field(default="", compare=False)
    """Source and row number; no part of what the row is."""

    def with_media(self, reader: MediaReader) -> Self:
        """Return the row: it shows nothing."""
        del reader
        return self


@dataclass(frozen=True)
class StepParser:
    """Reads rows as answers in labelled steps; options as in `StepwiseDataModule`."""

    chat: ChatFormat
    prompt_column: str = "prompt"
    steps_column: str = "completions"
    labels_column: str = "labels"
    as_chat: bool = False
    system_prompt: str | None = None

    def __call__(self, row: Row, folder: Path | None = None) -> StepDraft:
        """Parse one row, or raise `BadRow`."""
        del folder
        row = with_turns(row, self.prompt_column)
        names = ("prompt_column", "steps_column", "labels_column")
        for setting in names:
            if row.get(getattr(self, setting)) is None:
                raise missing_column(getattr(self, setting), row, setting=setting)
        steps = tuple(self._steps(row))
        labels = tuple(self._labels(row))
        if len(steps) != len(labels):
            raise BadRow(
                "label count",
                f"column {self.labels_column!r} has {len(labels)} labels for the {len(steps)} "
                f"steps of {self.steps_column!r}",
                remedy="give one label per step, null for a step without one",
            )
        if all(math.isnan(label) for label in labels):
            raise BadRow("no labels", f"no step has a label in column {self.labels_column!r}")
        prompt = self._prompt(row)
        if prompt.complete and self.chat.split_special_tokens:
            steps = tuple(split_text(self.chat.tokenizer, list(steps)))
        return StepDraft(prompt, steps, labels, prompt.text)

    def _prompt(self, row: Row) -> Text:
        value = row[self.prompt_column]
        if isinstance(value, str):
            text = text_of(row, self.prompt_column)
            if not self.as_chat:
                return Text(text, complete=False)
            value = [{"role": "user", "content": text}]
        messages = with_system(read_messages(value, self.prompt_column), row, self.system_prompt)
        return Text(self.chat.render(messages, row, prompt=True), complete=True)

    def _steps(self, row: Row) -> Iterator[str]:
        for number, step in enumerate(self._list(row, self.steps_column), start=1):
            what = f"step {number} of column {self.steps_column!r}"
            if not isinstance(step, str):
                raise BadRow("wrong type", f"{what} should be text, not {step!r:.60}")
            if not step.strip():
                raise BadRow("empty text", f"{what} is empty")
            yield valid_text(step, what)

    def _labels(self, row: Row) -> Iterator[float]:
        for number, label in enumerate(self._list(row, self.labels_column), start=1):
            if label is None:
                yield math.nan
            elif isinstance(label, bool | int | float) and 0 <= label <= 1:
                yield float(label)
            else:
                raise BadRow(
                    "unknown label",
                    f"label {number} of column {self.labels_column!r} is {label!r:.60}",
                    remedy="labels are true or false, a probability from 0 to 1, or null; "
                    "python -m lrlhf.examples.convert_steps converts published sets",
                )

    @staticmethod
    def _list(row: Row, column: str) -> list[object]:
        entries: list[object] | None = structure_of(row, column, list)
        if entries is None:
            raise wrong_type(column, "a list", row[column])
        if not entries:
            raise BadRow("empty list", f"column {column!r} is an empty list")
        return entries


def tokenize_steps(
    tokenizer: PreTrainedTokenizerBase, drafts: Sequence[StepDraft], separator: str
) -> list[StepRow | BadRow]:
    """Tokenise prompts and steps, each by itself, so that a step ends where a token does.

    Raises:
        ValueError: The tokenizer makes no token of the separator.
    """
    (behind,) = tokenize(tokenizer, [Text(separator, complete=True)])
    if not len(behind):
        raise ValueError(f"the tokenizer has no token for the step_separator {separator!r}")
    prompts = tokenize_prompts(tokenizer, [draft.prompt for draft in drafts])
    texts = [Text(step, complete=True) for draft in drafts for step in draft.steps]
    pieces = iter(tokenize(tokenizer, texts))
    rows: list[StepRow | BadRow] = []
    for draft, prompt in zip(drafts, prompts, strict=True):
        own = [next(pieces).tolist() for _ in draft.steps]
        joined = joined_steps(prompt.tolist(), own, behind.tolist())
        rows.append(
            StepRow(
                input_ids=np.asarray(joined.input_ids, dtype=np.int32),
                ends=tuple(joined.ends),
                labels=draft.labels,
                start=len(prompt),
                key=digest(draft.key),
            )
        )
    return rows


def collate_steps(rows: Sequence[StepRow], pad_token_id: int) -> StepBatch:
    """Make a right-padded batch."""
    input_ids, attention_mask = padded(rows, pad_token_id, "right")
    labels = []
    for row in rows:
        own = torch.full((len(row.input_ids),), -1.0)
        own[list(row.ends)] = torch.tensor(row.labels)
        labels.append(own)
    padded_labels = pad_sequence(labels, batch_first=True, padding_value=-1.0)
    return StepBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        response_mask=padded_labels >= 0,
        step_ends=padded_labels != -1,  # NaN too: a step without a label
        labels=padded_labels.nan_to_num(0.0).clamp(min=0.0),
        starts=torch.tensor([row.start for row in rows]),
        places=tuple(row.place for row in rows),
    )
