"""Triton kernels for CUDA devices: one pass over a block of logits, and one for its gradient.

PyTorch's operations read or write a block of float32 six times for either, and with the entropy 12
and 15 times. `lrlhf.functional.online_softmax` has the formulas (Milakov and Gimelshein 2018,
algorithm 3, https://arxiv.org/abs/1805.02867; here also for the entropy) and imports this module.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrlhf.functional.online_softmax import FAR, RowGradients

_FAR = tl.constexpr(FAR)
_COLUMNS = tl.constexpr(4096)
"""Logits that a program has in its registers; a power of 2."""


def add_statistics(
    logits: Tensor, targets: Tensor, state: list[Tensor | None], start: int, scale: float
) -> None:
    """Do what `OnlineSoftmax.add` does, with logits `[R, C]` of any precision, to its state.

    That is, for each of R rows: the target's logit, the largest one, Σ e^s, and Σ e^s s or None.
    """
    arguments = logits, logits.stride(0), targets.contiguous(), *state, start, logits.shape[1]
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _add_statistics[(len(logits),)](*arguments, scale, num_warps=8)


def write_gradient(logits: Tensor, out: Tensor, rows: RowGradients, start: int) -> None:
    """Write what `logits_gradient` returns to ``out``: contiguous `[R, C]`, perhaps the logits."""
    numbers = (each.contiguous() if isinstance(each, Tensor) else each for each in rows)
    arguments = logits, logits.stride(0), out, start, logits.shape[1], *numbers
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        grid = len(logits), triton.cdiv(logits.shape[1], _COLUMNS.value)
        _write_gradient[grid](*arguments, num_warps=8)


@triton.jit
@no_type_check
def _add_statistics(  # noqa: PLR0913  pointers and sizes
    logits, stride, targets, chosen, largest, total, moment, start, size, scale: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    top = tl.load(largest + row)
    weight = tl.load(total + row)
    if moment is not None:
        weighted = tl.load(moment + row)
    target = tl.load(targets + row) - start
    if (target >= 0) & (target < size):
        tl.store(chosen + row, tl.load(logits + target).to(top.dtype) * scale)
    for first in range(0, size, _COLUMNS):
        ids = first + tl.arange(0, _COLUMNS)
        z = tl.load(logits + ids, mask=ids < size, other=-float("inf")).to(top.dtype) * scale
        higher = tl.maximum(top, tl.max(z, axis=0))
        drop = tl.maximum(top - higher, _FAR)
        below = z - higher
        p = tl.exp(below)
        if moment is not None:
            weighted = (weighted + drop * weight) * tl.exp(drop)
            weighted += tl.sum(p * tl.maximum(below, _FAR), axis=0)
        weight = weight * tl.exp(drop) + tl.sum(p, axis=0)
        top = higher
    tl.store(largest + row, top)
    tl.store(total + row, weight)
    if moment is not None:
        tl.store(moment + row, weighted)


@triton.jit
@no_type_check
def _write_gradient(  # noqa: PLR0913  pointers and sizes
    logits, stride, out, start, size, targets, lse, entropy, d_logp, d_entropy, scale: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * _COLUMNS + tl.arange(0, _COLUMNS)
    z = tl.load(logits + row * stride + ids, mask=ids < size, other=0.0)
    log_p = z.to(lse.dtype.element_ty) * scale - tl.load(lse + row)
    weight = tl.load(d_logp + row)
    factor = -weight
    if d_entropy is not None:
        surprise = tl.maximum(log_p, _FAR) + tl.load(entropy + row)
        factor = -tl.load(d_entropy + row) * surprise - weight
    own = ids == tl.load(targets + row) - start
    gradient = tl.exp(log_p) * factor + tl.where(own, weight, 0.0)
    tl.store(out + row * size + ids, gradient.to(out.dtype.element_ty), mask=ids < size)
