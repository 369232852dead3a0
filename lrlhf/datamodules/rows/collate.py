"""Tokenised rows, and how several of them become one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.media_rows import MediaReader, Unread
from lrlhf.datamodules.rows.tokenizing import Tokens, common_prefix
from lrlhf.types import Media, PreferenceBatch, Prompt, PromptBatch, SequenceBatch


class _OneText:
    """A row with one text, which may show something."""

    input_ids: Tokens
    unread: Unread | None

    @property
    def all_unread(self) -> tuple[Unread, ...]:
        """Its media, if there are any."""
        return () if self.unread is None else (self.unread,)

    @property
    def plain_ids(self) -> tuple[Tokens, ...]:
        """Its tokens, if it shows nothing."""
        return (self.input_ids,) if self.unread is None else ()


@dataclass(frozen=True)
class PromptRow(_OneText):
    """One tokenised prompt."""

    prompt: Prompt
    input_ids: Tokens
    columns: Mapping[str, Any]
    unread: Unread | None = None
    media: Media | None = None

    def with_media(self, reader: MediaReader) -> PromptRow:
        """Read the images and videos, or raise `BadRow`."""
        if self.unread is None:
            return self
        input_ids, media = reader(self.unread, self.input_ids)
        if input_ids[-1] in reader.processor.placeholders.values():
            # its last token is computed again for every response, without what it stands for
            raise BadRow(
                "ends with an image",
                f"{', '.join(media.names)}: nothing comes after it",
                remedy="put some text after the last image or video of a prompt",
            )
        return replace(self, input_ids=input_ids, media=media)


@dataclass(frozen=True)
class Candidate(_OneText):
    """One tokenised answer with its prompt before it."""

    input_ids: Tokens
    start: int
    """Where the answer begins: behind images and videos, or at 0, where all of it counts."""
    unread: Unread | None = None
    media: Media | None = None

    def with_media(self, reader: MediaReader) -> Candidate:
        """Read the images and videos, or raise `BadRow`."""
        if self.unread is None:
            return self
        input_ids, media = reader(self.unread, self.input_ids)
        if self.unread.prompt is not None:
            start = common_prefix(reader(self.unread.prompt, self.input_ids)[0], input_ids)
        elif np.array_equal(input_ids[: self.start], self.input_ids[: self.start]):
            start = self.start  # nothing is shown before it
        else:
            start = self.start + len(input_ids) - len(self.input_ids)
        return replace(self, input_ids=input_ids, start=start, media=media)


@dataclass(frozen=True)
class PairRow:
    """One tokenised pair."""

    candidate0: Candidate
    candidate1: Candidate
    labels: tuple[float, ...]
    margin: float | None
    keys: tuple[str, ...]
    """Pairs that share one belong on the same side of a split."""
    info: Mapping[str, Any]

    @property
    def all_unread(self) -> tuple[Unread, ...]:
        """The media of both."""
        return (*self.candidate0.all_unread, *self.candidate1.all_unread)

    @property
    def plain_ids(self) -> tuple[Tokens, ...]:
        """The tokens of each that shows nothing."""
        return (*self.candidate0.plain_ids, *self.candidate1.plain_ids)

    def with_media(self, reader: MediaReader) -> PairRow:
        """Read the images and videos of both, or raise `BadRow`."""
        first, second = (one.with_media(reader) for one in (self.candidate0, self.candidate1))
        if first.unread and second.unread and first.unread.refs.key == second.unread.refs.key:
            # the same object, so that the model looks once
            second = replace(second, media=first.media)
        return replace(self, candidate0=first, candidate1=second)


@dataclass(frozen=True)
class PromptCollator:
    """Makes left-padded batches of prompts.

    Args:
        pad_token_id: Any id; what is padding is told by the mask.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[PromptRow]) -> PromptBatch:
        """Collate ``rows``."""
        width = max(len(row.input_ids) for row in rows)
        input_ids = torch.full((len(rows), width), self.pad_token_id, dtype=torch.long)
        attention_mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for index, row in enumerate(rows):
            start = width - len(row.input_ids)
            input_ids[index, start:] = torch.from_numpy(row.input_ids)
            attention_mask[index, start:] = True
        return PromptBatch(
            input_ids=input_ids,
            attention_mask=attention_mask,
            prompts=tuple(row.prompt for row in rows),
            columns=tuple(row.columns for row in rows),
            media=media_of(rows),
        )


@dataclass(frozen=True)
class PreferenceCollator:
    """Makes right-padded batches of pairs; each side is as wide as its own longest row.

    Args:
        pad_token_id: Any id; what is padding is told by the mask.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[PairRow]) -> PreferenceBatch:
        """Collate ``rows``."""
        margins = [row.margin for row in rows if row.margin is not None]
        return PreferenceBatch(
            candidate0=right_padded([row.candidate0 for row in rows], self.pad_token_id),
            candidate1=right_padded([row.candidate1 for row in rows], self.pad_token_id),
            labels=torch.tensor([row.labels for row in rows], dtype=torch.float32),
            margin=torch.tensor(margins, dtype=torch.float32) if margins else None,
            info=tuple(row.info for row in rows),
        )


def right_padded(candidates: Sequence[Candidate], pad_token_id: int) -> SequenceBatch:
    """Put sequences into right-padded rows; each is trained on from its ``start``."""
    width = max(len(candidate.input_ids) for candidate in candidates)
    input_ids = torch.full((len(candidates), width), pad_token_id, dtype=torch.long)
    attention_mask = torch.zeros(len(candidates), width, dtype=torch.bool)
    response_mask = torch.zeros(len(candidates), width, dtype=torch.bool)
    for index, candidate in enumerate(candidates):
        end = len(candidate.input_ids)
        input_ids[index, :end] = torch.from_numpy(candidate.input_ids)
        attention_mask[index, :end] = True
        response_mask[index, candidate.start : end] = True
    return SequenceBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        response_mask=response_mask,
        media=media_of(candidates),
    )


def media_of(rows: Sequence[PromptRow | Candidate]) -> tuple[Media | None, ...] | None:
    """Return the media of each row; None: no row has any."""
    media = tuple(row.media for row in rows)
    return media if any(entry is not None for entry in media) else None
