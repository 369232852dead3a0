"""Small batches, written out."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lrlhf.types import Experience, Media, PreferenceBatch, SequenceBatch

NAN = float("nan")


def experience(rows: int = 2, **changes: Any) -> Experience:
    """Three prompt and two response tokens per row; everything 0."""
    shape = (rows, 5)
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[:, 3:] = True
    zeros = torch.zeros(shape)
    made = Experience(
        input_ids=torch.arange(5).expand(shape),
        attention_mask=torch.ones(shape, dtype=torch.bool),
        response_mask=mask,
        sampling_logprobs=zeros,
        group_ids=torch.zeros(rows, dtype=torch.long),
        truncated=torch.zeros(rows, dtype=torch.bool),
        scores=torch.zeros(rows),
        old_logprobs=zeros,
        advantages=zeros,
        loss_mask=mask,
        counted=torch.ones(rows, dtype=torch.bool),
        ref_logprobs=zeros,
    )
    return replace(made, **changes)


def filled(value: float, *, column: int = 3) -> Tensor:
    """`[2, 5]`, 0 but for one entry of the second row."""
    tensor = torch.zeros(2, 5)
    tensor[1, column] = value
    return tensor


def sequences(media: tuple[Media | None, ...] | None = None) -> SequenceBatch:
    mask = torch.tensor([[True, True], [True, False]])
    ids = torch.tensor([[1, 2], [3, 0]])
    return SequenceBatch(input_ids=ids, attention_mask=mask, response_mask=mask, media=media)


def pairs(**changes: Any) -> PreferenceBatch:
    """Two pairs."""
    made = PreferenceBatch(
        candidate0=sequences(),
        candidate1=sequences(),
        labels=torch.tensor([[1.0, NAN], [0.0, -1.0]]),
        info=({"row": 0}, {"row": 1}),
    )
    return replace(made, **changes)
