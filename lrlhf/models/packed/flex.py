"""FlexAttention over packed rows, and what it does not compute.

The kernels are those that ``transformers`` compiles for its own ``flex_attention``. On CUDA they
leave out whole blocks of tokens that do not see each other, and keep queries, keys, values and one
number per query for the backward pass: no mask, no copy of a prefix for each of its branches.
``torch`` has no backward pass of it on CPUs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lrlhf.models.packed.packing import BLOCK, walk

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
        mask: Which of them see each other, see `lrlhf.models.packed.packing.Tour`.
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
    return _compute(module, (query, key, value), mask, scaling=scaling, **options)


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
    shapes = tuple((part.shape[1], part.shape[-1]) for part in (query, key, value))
    return tried(shapes, query.dtype, query.device)


@functools.cache
def tried(
    shapes: tuple[tuple[int, int], ...], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Try the kernel on a short text, forward and backward, before anything depends on it.

    A machine may lack a compiler, or memory that the kernel needs for its tiles.

    Args:
        shapes: Number and size of the heads of queries, keys and values.
        dtype: Of all of them.
        device: Where they are.

    Returns:
        What went wrong; None: it gives what ``sdpa`` does.
    """
    numbers = torch.Generator().manual_seed(0)
    parts = [
        torch.randn((1, heads, 2 * BLOCK, size), generator=numbers).to(device, dtype)
        for heads, size in shapes
    ]
    text = torch.arange(2 * BLOCK)
    mask = walk([_Text(text[:0], text)], device).mask(None)
    layer = SimpleNamespace(num_key_value_groups=shapes[0][0] // shapes[1][0], training=True)
    try:
        found = _outcome(parts, lambda q, k, v: _compute(layer, (q, k, v), mask, scaling=None))
    except Exception as error:  # noqa: BLE001  of a compiler, a driver, a kernel: sdpa needs none
        lines = str(error).strip().splitlines() or [""]
        return f"anything here ({type(error).__name__}: {lines[0]})"
    expected = _outcome(
        parts,
        lambda q, k, v: sdpa_attention_forward(layer, q, k, v, None, is_causal=True)[0],  # type: ignore[arg-type]
    )
    allowed = 1e-3 if dtype == torch.float32 else 5e-2
    if any((a - b).abs().max() > allowed * b.abs().max() for a, b in zip(found, expected)):  # noqa: B905
        return "attention here as sdpa does"
    return None


class _Text(NamedTuple):
    """One chain of tokens."""

    before: Tensor
    own: Tensor


@torch.inference_mode(False)
@torch.enable_grad()
def _outcome(parts: list[Tensor], attend: Callable[..., Tensor]) -> list[Tensor]:
    """Return the result of attention and its gradients, in float32."""
    leaves = [part.clone().requires_grad_() for part in parts]
    result = attend(*leaves)
    gradients = torch.autograd.grad(result.float().square().sum(), leaves)
    return [result.detach().float(), *(gradient.float() for gradient in gradients)]


def _compute(
    module: Any, heads: Heads, mask: BlockMask, *, scaling: float | None, **options: Any
) -> Tensor:
    if heads[0].device.type == "cuda":  # rows of one block would get the kernels for generation
        options["kernel_options"] = {"BACKEND": "TRITON"}
    with torch.compiler.config.patch(recompile_limit=_VARIANTS):  # type: ignore[attr-defined]
        result: Tensor = flex_attention_forward(module, *heads, mask, scaling=scaling, **options)[0]
    return result
