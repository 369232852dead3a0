"""Tokenised rows, and how several of them become one batch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.chat import Mask, Tokens, common_prefix
from lrlhf.datamodules.rows.media_rows import MediaReader, TokenizedText
from lrlhf.types import Media, PreferenceBatch, Prompt, PromptBatch, SequenceBatch


@dataclass(frozen=True, kw_only=True)
class PromptRow(TokenizedText):
    """One tokenised prompt."""

    prompt: Prompt
    columns: Mapping[str, Any]
    place: str = field(default="", compare=False)
    """Source and row number; no part of what the row is."""

    def with_media(self, reader: MediaReader) -> PromptRow:
        """Read the images and videos, or raise `BadRow`."""
        if self.deferred is None:
            return self
        input_ids, media = reader.read(self.deferred, self.input_ids)
        if input_ids[-1] in reader.placeholders:
            # its last token is computed again for every response, without what it stands for
            raise BadRow(
                "ends with an image",
                f"{', '.join(media.names)}: nothing comes after it",
                remedy="put some text after the last image or video of a prompt",
            )
        return replace(self, input_ids=input_ids, media=media)


@dataclass(frozen=True, kw_only=True)
class Candidate(TokenizedText):
    """One tokenised answer with its prompt before it."""

    start: int
    """Where the answer begins: behind images and videos, or at 0, where all of it counts."""
    trained: Mask | None = None
    """Which tokens count of an answer that is more than a turn of the assistant's; None: all."""

    def with_media(self, reader: MediaReader) -> Candidate:
        """Read the images and videos, or raise `BadRow`."""
        if self.deferred is None:
            return self
        input_ids, media = reader.read(self.deferred, self.input_ids)
        if self.deferred.prompt is not None:
            start = common_prefix(reader.read(self.deferred.prompt, self.input_ids)[0], input_ids)
        elif np.array_equal(input_ids[: self.start], self.input_ids[: self.start]):
            start = self.start  # nothing is shown before it
        else:
            start = self.start + len(input_ids) - len(self.input_ids)
        trained = self.trained
        if trained is not None:
            trained = moved_mask(self.input_ids, trained, input_ids, reader.placeholders)
        return replace(self, input_ids=input_ids, start=start, trained=trained, media=media)


@dataclass(frozen=True, kw_only=True)
class PairRow:
    """One tokenised pair."""

    texts: tuple[Candidate, Candidate]
    labels: tuple[float, ...]
    margin: float | None
    keys: tuple[str, ...]
    """Pairs that share one belong in the same split."""
    info: Mapping[str, Any]
    place: str = field(default="", compare=False)
    """Source and row number; no part of what the pair is."""
    source_texts: tuple[str, str, str] | None = field(default=None, compare=False)
    """Prompt and answers as the row has them; None: the tokens give them back."""

    def with_media(self, reader: MediaReader) -> PairRow:
        """Read the images and videos of both, or raise `BadRow`."""
        first, second = (text.with_media(reader) for text in self.texts)
        if (
            first.deferred
            and second.deferred
            and first.deferred.refs.key == second.deferred.refs.key
        ):
            # the same object, so that the model looks once
            second = replace(second, media=first.media)
        return replace(self, texts=(first, second))


RowT = TypeVar("RowT", PromptRow, PairRow)


def with_place(row: RowT, place: str) -> RowT:
    """Tell a row where it stands in the data."""
    return replace(row, place=place)


def collate_prompts(rows: Sequence[PromptRow], pad_token_id: int) -> PromptBatch:
    """Make a left-padded batch; the padding is any id, as the mask says what is padding."""
    input_ids, attention_mask = padded(rows, pad_token_id, "left")
    return PromptBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        prompts=tuple(row.prompt for row in rows),
        columns=tuple(row.columns for row in rows),
        media=media_of(rows),
        places=tuple(row.place for row in rows),
    )


def collate_pairs(rows: Sequence[PairRow], pad_token_id: int) -> PreferenceBatch:
    """Make a right-padded batch; each candidate is as wide as its own longest row."""
    margins = [row.margin for row in rows if row.margin is not None]
    return PreferenceBatch(
        candidate0=right_padded([row.texts[0] for row in rows], pad_token_id),
        candidate1=right_padded([row.texts[1] for row in rows], pad_token_id),
        labels=torch.tensor([row.labels for row in rows], dtype=torch.float32),
        margin=torch.tensor(margins, dtype=torch.float32) if margins else None,
        info=tuple(row.info for row in rows),
        places=tuple(row.place for row in rows),
        source_texts=tuple(row.source_texts for row in rows),
        prompt_ids=torch.tensor([_number_of(row.keys) for row in rows]),
    )


def _number_of(keys: tuple[str, ...]) -> int:
    """Return a number of 60 bits that equal keys have in common, on every rank."""
    return int(hashlib.blake2b("\n".join(keys).encode()).hexdigest()[:15], 16)


def right_padded(candidates: Sequence[Candidate], pad_token_id: int) -> SequenceBatch:
    """Put sequences into right-padded rows, trained on from their ``start``, or as they say."""
    input_ids, attention_mask = padded(candidates, pad_token_id, "right")
    starts = torch.tensor([candidate.start for candidate in candidates])
    answers = torch.arange(input_ids.shape[1]) >= starts[:, None]
    for row, candidate in enumerate(candidates):
        if candidate.trained is not None:
            answers[row, : len(candidate.trained)] &= torch.from_numpy(candidate.trained)
    return SequenceBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        response_mask=attention_mask & answers,
        media=media_of(candidates),
    )


def padded(
    rows: Sequence[TokenizedText], pad_token_id: int, side: Literal["left", "right"]
) -> tuple[Tensor, Tensor]:
    """Return the ids `[B, T]` int64 and the mask `[B, T]` of what is no padding."""
    ids = [torch.from_numpy(row.input_ids).long() for row in rows]
    mask = [torch.ones(len(row), dtype=torch.bool) for row in ids]
    return (
        pad_sequence(ids, batch_first=True, padding_value=pad_token_id, padding_side=side),
        pad_sequence(mask, batch_first=True, padding_value=0, padding_side=side),
    )


def media_of(rows: Sequence[TokenizedText]) -> tuple[Media | None, ...] | None:
    """Return the media of each row; None: no row has any."""
    media = tuple(row.media for row in rows)
    return media if any(entry is not None for entry in media) else None


def moved_mask(short: Tokens, mask: Mask, long: Tokens, placeholders: Sequence[int]) -> Mask:
    """Find the tokens of a mask again, where each placeholder has become several tokens.

    No loss is on what stands for an image or video.

    Args:
        short: Ids with one placeholder for each image or video.
        mask: Of these.
        long: Ids of the same text as the model reads it.
        placeholders: Ids that stand for images and videos.

    Raises:
        BadRow: The texts between images occur in more than one place that they could have.
    """
    marks = np.isin(short, placeholders)
    if (mask | marks)[1:].all():
        return ~np.isin(long, placeholders) & (np.arange(len(long)) > 0)
    first = _expanded(short, mask, long, placeholders, marks)
    back = _expanded(short[::-1], mask[::-1], long[::-1], placeholders, marks[::-1])
    if first is None or back is None or not np.array_equal(first, back[::-1]):
        raise BadRow(
            "unclear turns",
            "where the texts between its images are in the model's input is not clear",
            remedy="show the images in one turn, or set `loss_on` to all",
        )
    return first


def _expanded(
    short: Tokens, mask: Mask, long: Tokens, placeholders: Sequence[int], marks: Mask
) -> Mask | None:
    """Place what is between placeholders as early as it fits; None: it does not."""
    moved = np.zeros(len(long), dtype=np.bool_)
    cuts = [-1, *np.nonzero(marks)[0].tolist(), len(short)]
    shown = np.isin(long, placeholders)
    start = 0
    for number, (left, right) in enumerate(pairwise(cuts)):
        piece, own = short[left + 1 : right], mask[left + 1 : right]
        if number:  # behind what the image has become, of which one token at least is its mark
            indices = np.nonzero(shown[start:])[0]
            if not len(indices):
                return None
            start += int(indices[0]) + 1
            if right == len(short):
                start = max(start, len(long) - len(piece))
        while not np.array_equal(long[start : start + len(piece)], piece):
            start += 1
            if not number or start + len(piece) > len(long):
                return None
        moved[start : start + len(piece)] = own
        start += len(piece)
    return moved if start == len(long) else None
