"""Prompts that are computed once and continued by several responses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from lrlhf.models import (
    backbone_inputs,
    check_media,
    forget_offsets,
    numbers_media,
    repeat_offsets,
)
from lrlhf.rollout.responses import repeated_media
from lrlhf.types import Media


def prefill(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "B P"],
    mask: Int[Tensor, "B P"],
    media: tuple[Media | None, ...] | None,
    *,
    num_generations: int,
    share: bool,
) -> DynamicCache | None:
    """Compute what a model keeps of all prompt tokens but the last, for every response.

    What is shown is looked at here, so that the steps that follow are about text alone.

    Args:
        model: Generates.
        input_ids: One row per prompt, left-padded.
        mask: 1 where there is no padding.
        media: Images and videos of each prompt.
        num_generations: Responses per prompt.
        share: Compute each prompt once and copy; off: once per response.

    Returns:
        The cache, a row per response; None: there is nothing to gain, so the model makes its own.
    """
    forget_offsets(model)
    copies = num_generations if share else 1
    if input_ids.shape[1] < 2 or (copies == 1 and media is None):
        return None
    if not share:
        input_ids = input_ids.repeat_interleave(num_generations, dim=0)
        mask = mask.repeat_interleave(num_generations, dim=0)
        media = repeated_media(media, num_generations)
    check_media(model, input_ids[:, :-1], media)
    inputs = backbone_inputs(model, input_ids[:, :-1], mask[:, :-1].bool(), media)
    if not numbers_media(model, media):
        inputs["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, :-1]
    cache = DynamicCache(config=model.config)
    model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
    if copies > 1:
        # as beam search copies, which every kind of layer can, those of state spaces too
        rows = torch.arange(len(input_ids), device=input_ids.device)
        cache.reorder_cache(rows.repeat_interleave(copies))  # type: ignore[arg-type]
    repeat_offsets(model, copies)
    return cache


@contextlib.contextmanager
def plain_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Keep a checkpoint's generation defaults (repetition penalty, temperature) out of it.

    ``generate`` fills what a given config leaves open from the model's own.
    """
    before: Any = model.generation_config
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        model.generation_config = before
