"""One row of an unpaired preference data set: a prompt, an answer, and whether it is desirable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.loading.splits import Located, Split
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow, missing_column
from lrlhf.datamodules.rows.columns import with_turns
from lrlhf.datamodules.rows.preference_rows import candidate_columns, split_pair
from lrlhf.datamodules.rows.supervised_rows import (
    LossOn,
    SupervisedDraft,
    SupervisedParser,
    SupervisedRow,
    collate_supervised,
)
from lrlhf.types import SupervisedBatch, UnpairedBatch

_LABELS = {"true": True, "false": False}
"""As files of plain text write them."""


@dataclass(frozen=True, kw_only=True)
class UnpairedRow(SupervisedRow):
    """One tokenised answer with its prompt before it, and the answer to another prompt."""

    label: bool | None = None  # a part of what the row is
    other: SupervisedRow | None = field(default=None, compare=False)
    """Has that answer; None: there is none that fits behind this prompt."""

    def mismatched(self) -> SupervisedRow:
        """Return the prompt with the other answer; without one the prompt, where nothing counts."""
        parts: list[tuple[SupervisedRow, slice]] = [(self, slice(_start(self)))]
        if self.other is not None:
            parts.append((self.other, slice(_start(self.other), None)))
        ids = np.concatenate([row.input_ids[cut] for row, cut in parts])
        trained = np.concatenate([row.trained[cut] for row, cut in parts])
        return replace(self, input_ids=ids, trained=trained)


def _start(row: SupervisedRow) -> int:
    """Return where the answer begins."""
    return int(row.trained.argmax())


@dataclass(frozen=True)
class UnpairedParser(SupervisedParser):
    """Reads rows as labelled answers; options as in `UnpairedPreferenceDataModule`."""

    loss_on: LossOn | None = "completion"
    text_column: str | None = None
    or_all: ClassVar[str] = ""
    label_column: str = "label"
    chosen_column: str = "chosen"
    rejected_column: str = "rejected"

    def expand(self, row: Row) -> Sequence[Row]:
        """Return the two rows that a pair stands for; of another row itself."""
        names = (self.chosen_column, self.rejected_column)
        if row.get(self.label_column) is not None or all(row.get(name) is None for name in names):
            return (row,)
        candidate_columns(row, names)
        turns = with_turns(row, self.prompt_column, *names)
        before, *answers = split_pair(turns, self.prompt_column, names, as_chat=self.as_chat)
        shared = {key: value for key, value in row.items() if key not in names}
        shared[self.prompt_column] = before
        return tuple(
            {**shared, self.completion_column: answer, self.label_column: label}
            for answer, label in zip(answers, (True, False), strict=True)
        )

    def __call__(self, row: Row, folder: Path | None = None) -> SupervisedDraft:
        """Parse one row, or raise `BadRow`; relative paths start from ``folder``."""
        value = row.get(self.label_column)
        if value is None:
            raise missing_column(self.label_column, row, setting="label_column")
        label = _LABELS.get(value.strip().lower()) if isinstance(value, str) else value
        if not isinstance(label, bool):
            raise BadRow(
                "unknown label",
                f"column {self.label_column!r} is {value!r:.60}",
                remedy="labels are true (desirable) or false (undesirable)",
            )
        return replace(super().__call__(row, folder), label=label)


def with_others(
    split: Split[SupervisedRow], what: str, *, marks: Sequence[int], needed: bool
) -> Split[UnpairedRow]:
    """Give each row the answer to another prompt, the same in every order of batches.

    Rows of one prompt stand together, and each has the answer that stands as many rows behind it as
    the most frequent prompt has. A pair that is longer than every row of the data is left out, and
    one whose answer shows an image, video or audio.

    Args:
        split: The rows.
        what: What messages call them; train rows must have both labels.
        marks: Token ids that stand for images, videos and audio.
        needed: Whether there have to be several prompts.

    Raises:
        BadDataError: All labels are equal, or all prompts.
    """
    rows = split.values
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.key, []).append(index)
    if what == "train":
        _check(rows, one_prompt=needed and len(groups) == 1)
    order = [index for own in groups.values() for index in own]
    shift = max(map(len, groups.values()), default=0)
    longest = max((len(row.input_ids) for row in rows), default=0)
    located: list[Located[Any]] = [*split.rows]
    for index, follower in zip(order, order[shift:] + order[:shift], strict=True):
        row, other = rows[index], rows[follower]
        answer = other.input_ids[_start(other) :]
        fits = _start(row) + len(answer) <= longest and not np.isin(answer, marks).any()
        found = other if fits and row.key != other.key else None
        located[index] = located[index]._replace(value=UnpairedRow(**vars(row), other=found))
    return Split(split.components, located, split.columns)


def _check(rows: Sequence[SupervisedRow], *, one_prompt: bool) -> None:
    if len({row.label for row in rows}) == 1:
        kind, instead = "undesirable", ""
        if rows[0].label:
            kind, instead = "desirable", ", or train SFT on these"
        raise BadDataError(
            f"all {len(rows)} train rows are {kind}, and KTO learns from what tells desirable and "
            f"undesirable answers apart: add rows with the other label{instead}"
        )
    if one_prompt:
        raise BadDataError(
            f"all {len(rows)} train rows have the same prompt, and the reference point of KTO is "
            "estimated from prompts with answers to other prompts: add rows with another prompt, "
            "or set model.loss to apo_zero_unpaired"
        )


def collate_unpaired(rows: Sequence[UnpairedRow], pad_token_id: int) -> UnpairedBatch:
    """Make a right-padded batch; the mismatched pairs are as wide as their own longest row."""
    pairs: SupervisedBatch = collate_supervised([row.mismatched() for row in rows], pad_token_id)
    labels = torch.tensor([row.label for row in rows])
    kind = partial(UnpairedBatch, labels=labels, mismatched=pairs.rows)
    return collate_supervised(rows, pad_token_id, kind)
