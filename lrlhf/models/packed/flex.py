"""FlexAttention over packed rows, and what it does not compute.

The kernels are those that ``transformers`` compiles for its own ``flex_attention``. On CUDA they
leave out whole blocks of tokens that do not see each other, and keep queries, keys, values and one
number per query for the backward pass: no mask, no copy of a prefix for each of its branches.
``torch`` has no backward pass of it on CPUs.
"""

from __future__ import annotations

import logging
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.integrations.flex_attention import flex_attention_forward

logger = logging.getLogger(__name__)

COMPUTED = ("softcap", "s_aux")
"""Keywords of attention that FlexAttention computes and ``sdpa`` does not."""

_HEAD_SIZES = range(16, 257)
"""On CUDA. Smaller ones are no tile of a tensor core, larger ones do not fit into its memory."""

_VARIANTS = 64
"""How often the kernel is compiled at most: with and without gradients, in another precision, with
another window, for the policy, its reference and a critic. ``torch`` goes on without compiling
behind 8, which materializes all scores."""

Heads: TypeAlias = tuple[Tensor, Tensor, Tensor]

_said: set[str] = set()


def flex_attention(
    module: nn.Module,
    heads: Heads,
    mask: BlockMask,
    *,
    dropout: float,
    scaling: float | None,
    **options: Any,
) -> Float[Tensor, "1 N Q E"] | None:
    """Compute the attention of a packed row.

    Args:
        module: The layer.
        heads: Queries, keys and values of all tokens, `[1, heads, N, D]` each.
        mask: Which of them see each other, see `lrlhf.models.packed.tour.Tour`.
        dropout: Share of the scores that are left out.
        scaling: Scores are multiplied by it; None: by 1/√D.
        options: Of `COMPUTED`.

    Returns:
        None where FlexAttention does not compute this; the log says what it was, once.
    """
    query, key, value = heads
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        # as sdpa does it: norms of queries and keys leave them in float32
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (part.to(dtype) for part in (query, key, value))
    reason = _obstacle(query, key, value, dropout, options)
    if reason is not None:
        if reason not in _said:
            _said.add(reason)
            logger.info("FlexAttention does not compute %s; sdpa does, with masks.", reason)
        return None
    if device == "cuda":  # rows of one block would get the kernels for generation
        options["kernel_options"] = {"BACKEND": "TRITON"}
    with torch.compiler.config.patch(recompile_limit=_VARIANTS):  # type: ignore[attr-defined]
        result: Tensor = flex_attention_forward(
            module, query, key, value, mask, scaling=scaling, **options
        )[0]
    return result


def _obstacle(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, options: dict[str, Any]
) -> str | None:
    """Say what FlexAttention cannot compute, if anything."""
    if dropout:
        return "dropout"
    if query.dtype == torch.float64 or not query.dtype == key.dtype == value.dtype:
        return f"products of {query.dtype} with {key.dtype} and {value.dtype}"
    if query.device.type == "cpu":
        if any(part.requires_grad for part in (query, key, value)):
            return "gradients on CPUs"
        if options.get("s_aux") is not None:
            return "attention sinks on CPUs"
        return None
    sizes = {query.shape[-1], value.shape[-1]}
    if not sizes <= set(_HEAD_SIZES):
        return f"heads of {max(sizes)} numbers"
    return None
