"""Whether a model's layers ask for more than ``sdpa`` computes.

``transformers`` hands every attention function whatever the model passes on, and ``sdpa`` leaves
out what it does not know without a word: Gemma 2's bounded scores (``softcap``), attention sinks.
What a model means is the function in its own file, which the library calls ``eager``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lrlhf.models.packed.packed_attention import additive, own_function

COMPARED_ATTENTION = "lrlhf_compared"
"""Of the one that computes with ``sdpa``, and compares it with the model's own, layer by layer."""

_TOLERANCE = 1e-4
_LARGE = 30.0
"""Queries of trained models make scores of this size, those of new ones far smaller."""

_differing: ContextVar[list[str]] = ContextVar("differing_attention")


@contextlib.contextmanager
def comparing() -> Iterator[list[str]]:
    """Note which layers ask for more than ``sdpa`` computes, by class, during the block."""
    found: list[str] = []
    token = _differing.set(found)
    try:
        yield found
    finally:
        _differing.reset(token)


def compared_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention in a trial, see `COMPARED_ATTENTION`.

    The two are compared in float32 on random queries and keys, small and large, whatever the
    precision and the weights of the model are.
    """
    own = own_function(module)
    options["dropout"] = 0.0
    if own is not None:
        mask = attention_mask
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.float()
        numbers = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(part.shape, generator=numbers).to(part.device)
            for part in (query, key, value)
        )
        q[:1] *= _LARGE
        bias = additive(module, q, k, mask, is_causal=options.get("is_causal", True))
        expected = own(module, q, k, v, bias, **options)[0]
        actual = sdpa_attention_forward(module, q, k, v, bias, **options)[0]
        if not torch.allclose(actual, expected, rtol=0, atol=_TOLERANCE * float(v.abs().max())):
            _differing.get().append(type(module).__name__)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


AttentionInterface.register(COMPARED_ATTENTION, compared_attention)
AttentionMaskInterface.register(COMPARED_ATTENTION, sdpa_mask)
