"""A number that tells whether two tensors hold the same bits."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_ROW = 2**16
_ROWS_AT_ONCE = 4
# 2^64 / golden ratio
_MIX = -7046029254386353131


@torch.no_grad()
def fingerprint(tensor: Tensor) -> int:
    """Sum the bits of a tensor in integer arithmetic that wraps around.

    Words are the tensor's 16 bits each, with a sign; of types of one byte the bytes without. Word
    ``c`` of a row is multiplied by ``weight(c)`` in 32 bits, and the sum of row ``r``, in 64 bits,
    by ``weight(r)``; a row has 2^16 words. Weights are odd and follow no pattern, so one other bit
    always gives another sum, and a transposed, a shifted, or an older tensor does too, but for a
    chance below 2^-16. It costs one pass over the memory, runs on any device, and does not depend
    on the order in which a device adds. It is no defence against someone who looks for a collision.

    Args:
        tensor: Any shape and type; a view in another memory layout gives the same number.
    """
    # longer words would lose their highest bits in the product: two turned signs would cancel
    word = torch.uint8 if tensor.element_size() == 1 else torch.int16
    words = tensor.contiguous().view(-1).view(word)
    weights = _weights(_ROW, tensor.device).int()
    whole = len(words) // _ROW * _ROW
    # a few rows at a time: a whole product would take up to four times the tensor's memory
    parts = torch.split(words[:whole].view(-1, _ROW), _ROWS_AT_ONCE)
    sums = [(rows * weights).sum(dim=1, dtype=torch.int64) for rows in parts if len(rows)]
    rest = words[whole:]
    sums.append((rest * weights[: len(rest)]).sum(dtype=torch.int64)[None])
    rows = torch.cat(sums)
    return int((rows * _weights(len(rows), tensor.device)).sum())


@functools.lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> Tensor:
    # outside inference mode, whose tensors could not be used by others
    with torch.inference_mode(False):
        mixed = torch.arange(1, count + 1, device=device) * _MIX
        return (mixed ^ (mixed >> 29)) * _MIX | 1
