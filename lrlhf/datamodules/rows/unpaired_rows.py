"""One row of an unpaired preference data set: a prompt, an answer, and whether it is desirable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.loading.splits import Split
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow, missing_column
from lrlhf.datamodules.rows.collate import Candidate, right_padded
from lrlhf.datamodules.rows.columns import with_turns
from lrlhf.datamodules.rows.conservation import Reached
from lrlhf.datamodules.rows.preference_rows import candidate_columns, split_pair
from lrlhf.datamodules.rows.supervised_rows import (
    SupervisedDraft,
    SupervisedParser,
    SupervisedRow,
    collate_supervised,
)
from lrlhf.types import UnpairedBatch

_LABELS = {"true": True, "false": False}
"""As files of plain text write them."""


@dataclass(frozen=True)
class UnpairedDraft(SupervisedDraft):
    """A row that was read and not yet tokenised."""

    label: bool = True

    @property
    def reached(self) -> Reached:
        """What of the row the model reads, and what of it is learnt."""
        of_text = super().reached
        return of_text._replace(besides=repr((of_text.besides, self.label)))


@dataclass(frozen=True, kw_only=True)
class UnpairedRow(SupervisedRow):
    """One tokenised answer with its prompt before it."""

    label: bool
    other: SupervisedRow | None = field(default=None, compare=False)
    """Has the answer to another prompt; None: there is none that fits behind this prompt."""

    @property
    def start(self) -> int:
        """Where the answer begins."""
        return int(self.trained.argmax())

    def mismatched(self) -> Candidate:
        """Return the prompt with the other answer; without one the prompt, where nothing counts."""
        ids, trained = self.input_ids[: self.start], np.zeros(self.start, dtype=np.bool_)
        if self.other is not None:
            first = int(self.other.trained.argmax())
            ids = np.concatenate([ids, self.other.input_ids[first:]])
            trained = np.concatenate([trained, self.other.trained[first:]])
        return Candidate(input_ids=ids, start=self.start, trained=trained, media=self.media)


@dataclass(frozen=True)
class UnpairedParser:
    """Reads rows as labelled answers; options as in `UnpairedPreferenceDataModule`."""

    texts: SupervisedParser
    label_column: str = "label"
    chosen_column: str = "chosen"
    rejected_column: str = "rejected"

    def expand(self, row: Row) -> Sequence[Row]:
        """Return the two rows that a pair stands for; of another row itself."""
        names = (self.chosen_column, self.rejected_column)
        if row.get(self.label_column) is not None or all(row.get(name) is None for name in names):
            return (row,)
        candidate_columns(row, names)
        prompt = self.texts.prompt_column
        turns = with_turns(row, prompt, *names)
        before, *answers = split_pair(turns, prompt, names, as_chat=self.texts.as_chat)
        shared = {key: value for key, value in row.items() if key not in names}
        columns = (self.texts.completion_column, self.label_column)
        return tuple(
            {**shared, prompt: before, **dict(zip(columns, own, strict=True))}
            for own in zip(answers, (True, False), strict=True)
        )

    def __call__(self, row: Row, folder: Path | None = None) -> UnpairedDraft:
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
        return UnpairedDraft(**vars(self.texts(row, folder)), label=label)


def labelled(
    drafts: Sequence[UnpairedDraft], rows: Sequence[SupervisedRow | BadRow], marks: Sequence[int]
) -> list[UnpairedRow | BadRow]:
    """Give tokenised rows their labels.

    Args:
        drafts: What they were made of.
        rows: The rows.
        marks: Token ids that stand for images, videos and audio, which answers cannot have.
    """
    found: list[UnpairedRow | BadRow] = []
    for draft, row in zip(drafts, rows, strict=True):
        if isinstance(row, BadRow):
            found.append(row)
        elif np.isin(row.input_ids[row.trained.argmax() :], marks).any() and row.deferred:
            found.append(
                BadRow(
                    "media in an answer",
                    "the answer shows an image, video or audio, which cannot stand behind another "
                    "prompt",
                    remedy="show it in the prompt",
                )
            )
        else:
            found.append(UnpairedRow(**vars(row), label=draft.label))
    return found


def with_others(split: Split[UnpairedRow], what: str, *, needed: bool) -> Split[UnpairedRow]:
    """Give each row the answer to another prompt, the same in every order of batches.

    Rows of one prompt stand together, and each has the answer that stands as many rows behind it as
    the most frequent prompt has. A pair that is longer than every row of the data is left out.

    Args:
        split: The rows.
        what: What messages call them; train rows must have both labels.
        needed: Whether there have to be several prompts.

    Raises:
        BadDataError: All labels are equal, or all prompts.
    """
    rows = split.values
    if what == "train" and rows and len({row.label for row in rows}) == 1:
        kind = "desirable" if rows[0].label else "undesirable"
        raise BadDataError(
            f"all {len(rows)} train rows are {kind}, and KTO learns from what tells desirable and "
            "undesirable answers apart: add rows with the other label"
            + (", or train SFT on these" if rows[0].label else "")
        )
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.key, []).append(index)
    if what == "train" and len(groups) == 1 and needed:
        raise BadDataError(
            f"all {len(rows)} train rows have the same prompt, and the reference point of KTO is "
            "estimated from prompts with answers to other prompts: add rows with another prompt, "
            "or set model.loss to apo_zero_unpaired"
        )
    order = [index for own in groups.values() for index in own]
    shift = max(map(len, groups.values()), default=0)
    longest = max((len(row.input_ids) for row in rows), default=0)
    located = list(split.rows)
    for place, index in enumerate(order):
        row, other = rows[index], rows[order[(place + shift) % len(order)]]
        length = row.start + len(other.input_ids) - other.start
        if row.key != other.key and length <= longest:
            located[index] = located[index]._replace(value=replace(row, other=other))
    return replace(split, rows=located)


def collate_unpaired(rows: Sequence[UnpairedRow], pad_token_id: int) -> UnpairedBatch:
    """Make a right-padded batch; the mismatched pairs are as wide as their own longest row."""
    batch = collate_supervised(rows, pad_token_id)
    return UnpairedBatch(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        response_mask=batch.response_mask,
        media=batch.media,
        places=batch.places,
        labels=torch.tensor([row.label for row in rows]),
        mismatched=right_padded([row.mismatched() for row in rows], pad_token_id),
    )
