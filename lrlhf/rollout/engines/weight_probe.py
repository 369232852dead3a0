"""A few responses by which engine and policy are compared."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.media import MediaProcessor
from lrlhf.rollout.engines.engine import ProbeGap
from lrlhf.types import Media, PromptBatch, Rollout

PROBE_RESPONSE = 8
"""Tokens of each response."""

_PROMPTS = 4
_PROMPT_TOKENS = 80
_IMAGE = 64


def probe_prompts(
    tokenizer: PreTrainedTokenizerBase, processor: MediaProcessor | None, *, max_model_len: int
) -> PromptBatch:
    """Return the same prompts every time, with an image also where the policy sees.

    They fill several blocks of a prefix cache, so that states which older weights left there
    show up too.
    """
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ordinary = [token for token in range(len(tokenizer)) if token not in special]
    length = max(1, min(_PROMPT_TOKENS, max_model_len - PROBE_RESPONSE))
    numbers = np.random.Generator(np.random.Philox(0))
    rows: list[list[int]] = numbers.choice(ordinary, (_PROMPTS, length)).tolist()
    media: list[Media | None] = [None] * _PROMPTS
    if processor is not None:
        seen = processor.specimen(tokenizer, size=_IMAGE)
        if len(seen.input_ids) + PROBE_RESPONSE <= max_model_len:
            rows.append(seen.input_ids)
            media.append(seen.media)
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    return PromptBatch(
        input_ids=ids,
        attention_mask=mask,
        prompts=("",) * len(rows),
        columns=({},) * len(rows),
        media=tuple(media),
    )


def gap_between(own: Float[Tensor, "B T"], rollout: Rollout, *, low_precision: bool) -> ProbeGap:
    """Compare the policy's log-probabilities with those that a rollout was sampled with."""
    mask = rollout.response_mask
    gaps = (own - rollout.sampling_logprobs).abs()
    # a row with NaN among its tokens has NaN as its median
    medians = [row[counts].median() for row, counts in zip(gaps, mask, strict=True)]
    typical = torch.stack(medians).max()
    return ProbeGap(
        float(typical), float(gaps[mask].mean()), float(gaps[mask].max()), low_precision
    )
