"""A number that tells whether two tensors hold the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

_ROW = 2**20
_WORDS = {1: torch.uint8, 2: torch.int16}
# 2^64 / golden ratio
_MIX = -7046029254386353131


@torch.no_grad()
def fingerprint(tensor: Tensor) -> int:
    """Sum the bits of a tensor in 64-bit integer arithmetic that wraps around.

    Words have one, two or four bytes, as integers with a sign where they have more than one. Word
    ``c`` of row ``r`` counts ``weight(c) * weight(r)`` times; a row has 2^20 words. Weights are odd
    and follow no pattern, so one other bit always gives another sum, and a transposed, a shifted,
    or an older tensor does too, but for a chance of about 2^-32. It costs one pass over the memory,
    runs on any device, and does not depend on the order in which a device adds. It is no defence
    against someone who looks for a collision.

    Args:
        tensor: Any shape and type; a view in another memory layout gives the same number.
    """
    words = tensor.contiguous().view(-1).view(_WORDS.get(tensor.element_size(), torch.int32))
    weights = _weights(min(len(words), _ROW), tensor.device)
    # row by row: a whole product would take four times the memory of 16-bit weights
    rows = torch.stack([(row * weights[: len(row)]).sum() for row in torch.split(words, _ROW)])
    return int((rows * _weights(len(rows), tensor.device)).sum())


def _weights(count: int, device: torch.device) -> Tensor:
    mixed = torch.arange(1, count + 1, device=device) * _MIX
    return (mixed ^ (mixed >> 29)) * _MIX | 1
