"""A number that tells whether two tensors hold the same bits."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

_ROW = 2**16
_WORDS = {1: torch.uint8, 2: torch.int16}
# 2^64 / golden ratio
_MIX = -7046029254386353131

_EVERY = 7
_WHOLE = 2**18
"""Words up to which a tensor is looked at whole; of larger ones it is every ``_EVERY``-th word."""


class Fingerprinted(Iterator[tuple[str, Tensor]]):
    """Named tensors, of each of which the fingerprint is taken as it passes.

    Args:
        tensors: What it goes through, once.
        turn: See `fingerprint`.
        seen: Where fingerprints are noted by name; None: in a table of its own.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        turn: int,
        seen: dict[str, Tensor] | None = None,
    ) -> None:
        self._tensors = iter(tensors)
        self.turn = turn
        self.seen = {} if seen is None else seen

    def __next__(self) -> tuple[str, Tensor]:
        name, tensor = next(self._tensors)
        self.seen[name] = fingerprint(tensor, turn=self.turn)
        return name, tensor


def as_text(fingerprints: Mapping[str, Tensor]) -> dict[str, str]:
    """Read fingerprints from the device, all at once; as text, which survives JSON."""
    if not fingerprints:
        return {}
    first = next(iter(fingerprints.values()))
    numbers = torch.stack([number.to(first.device) for number in fingerprints.values()]).tolist()
    return {name: str(number) for name, number in zip(fingerprints, numbers, strict=True)}


@torch.no_grad()
def fingerprint(tensor: Tensor, *, turn: int | None = None) -> Tensor:
    """Sum the bits of a tensor in integer arithmetic that wraps around.

    Words ``x`` have one, two or four bytes, as integers with a sign where they have more than one.
    Word ``c`` of a row gives ``(x ^ ((x >> 15) & (2^17 - 1))) * weight(c)`` in 32 bits, and the sum
    of row ``r``, in 64 bits, is multiplied by ``weight(r)``; a row has 2^16 words. Weights are odd
    and follow no pattern, so one other bit always gives another sum, and a transposed, a shifted,
    or an older tensor does too, but for a chance below 2^-15. It costs one pass over the memory,
    runs on any device, and does not depend on the order in which a device adds. It is no defence
    against someone who looks for a collision.

    With a ``turn``, of a tensor of more than 2^18 words every seventh counts, and the first of them
    moves on: one stretch of seven other words shows at once, and any single bit within seven turns.

    Args:
        tensor: Any shape and type; a view in another memory layout gives the same number.
        turn: Number of the push, which both sides have to agree on. None: every word counts.

    Returns:
        One int64, on the device of the tensor, for which nothing is waited for.
    """
    words = tensor.contiguous().view(-1).view(_WORDS.get(tensor.element_size(), torch.int32))
    if turn is not None and len(words) > _WHOLE:
        words = words[turn % _EVERY :: _EVERY].contiguous()
    weights = _weights(_ROW, tensor.device).int()
    whole = len(words) // _ROW * _ROW
    # on a processor so few that they stay in the cache of a core
    at_once = 4 if tensor.is_cpu else 256
    parts = torch.split(words[:whole].view(-1, _ROW), at_once)
    sums = [_row_sums(rows, weights) for rows in parts if len(rows)]
    sums.append(_row_sums(words[None, whole:], weights[: len(words) - whole]))
    rows = torch.cat(sums)
    return (rows * _weights(len(rows), tensor.device)).sum()


def _row_sums(rows: Tensor, weights: Tensor) -> Tensor:
    words = rows.int()
    # a product keeps no more than 32 bits: without their mark on lower bits the highest would not
    # depend on the weight, and two turned signs would cancel
    mixed = words >> 15
    mixed &= 2**17 - 1
    mixed ^= words
    mixed *= weights
    return mixed.sum(dim=1, dtype=torch.int64)


@functools.lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> Tensor:
    # outside inference mode, whose tensors could not be used by others
    with torch.inference_mode(False):
        mixed = torch.arange(1, count + 1, device=device) * _MIX
        found = (mixed ^ (mixed >> 29)) * _MIX | 1
    if device.type == "cuda":
        # weights arrive on several streams, and another than this one may read it next
        torch.cuda.current_stream(device).synchronize()
    return found
