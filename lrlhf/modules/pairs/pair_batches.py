"""Pairs as one batch of rows, and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lrlhf.types import SequenceBatch, joined_media


class PairScores(NamedTuple):
    """Scores of both candidates of every pair, [B, H] each."""

    candidate0: Tensor
    candidate1: Tensor


def concatenate(first: SequenceBatch, second: SequenceBatch, *, pad_id: int) -> SequenceBatch:
    """Stack the rows of two batches, right-padded to one length.

    Rows with the same place in both may begin with the same tokens, and are marked so.
    """
    length = max(first.input_ids.shape[1], second.input_ids.shape[1])

    def stacked(column: str, value: int | bool) -> Tensor:
        parts = [getattr(batch, column) for batch in (first, second)]
        return torch.cat(
            [functional.pad(part, (0, length - part.shape[1]), value=value) for part in parts]
        )

    return SequenceBatch(
        input_ids=stacked("input_ids", pad_id),
        attention_mask=stacked("attention_mask", value=False),
        response_mask=stacked("response_mask", value=False),
        media=joined_media([first, second]),
        group_ids=torch.arange(len(first)).repeat(2),
    )
