"""Fingerprints of tensors: equal for equal bits, different for others with high probability."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

_ROW = 2**16
_WORDS = {1: torch.uint8, 2: torch.int16}
# 2^64 / golden ratio
_MIX = -7046029254386353131

_STRIDE = 7
_COMPLETE = 2**18
"""Most words of a tensor that all count; of larger ones every ``_STRIDE``-th word counts."""


class Fingerprinted(Iterator[tuple[str, Tensor]]):
    """Iterator over named tensors that records their fingerprints in ``seen``."""

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
    """Return fingerprints as text for JSON, with one transfer from the device."""
    if not fingerprints:
        return {}
    first = next(iter(fingerprints.values()))
    numbers = torch.stack([number.to(first.device) for number in fingerprints.values()]).tolist()
    return {name: str(number) for name, number in zip(fingerprints, numbers, strict=True)}


@torch.no_grad()
def fingerprint(tensor: Tensor, *, turn: int | None = None) -> Tensor:
    """Weighted sum of the bits of a tensor in wrapping integer arithmetic.

    Words ``x`` have one, two or four bytes, as signed integers where they have more than one. Word
    ``c`` of a row contributes ``(x ^ ((x >> 15) & (2^17 - 1))) * weight(c)`` in 32 bits, and the
    sum of row ``r``, in 64 bits, is multiplied by ``weight(r)``; a row has 2^16 words. Weights are
    odd and pseudorandom, so a single different bit always changes the sum, and a transposed,
    shifted, or older tensor does except with a probability below 2^-15. It costs one pass over the
    memory, runs on any device, and does not depend on the order of additions. It is not
    cryptographic.

    With a ``turn``, every seventh word of a tensor of more than 2^18 words counts, with an offset
    of ``turn``: seven consecutive different words are found at once, and any bit in seven turns.

    Args:
        tensor: Any shape and type; the memory layout does not matter.
        turn: Number of the push, equal on both sides. None: every word counts.

    Returns:
        One int64 on the device of the tensor, without synchronisation.
    """
    words = words_of(tensor)
    if turn is not None and len(words) > _COMPLETE:
        words = words[turn % _STRIDE :: _STRIDE].contiguous()
    weights = _weights(_ROW, tensor.device).int()
    full = len(words) // _ROW * _ROW
    # on a CPU few enough for the cache of a core
    chunk = 4 if tensor.is_cpu else 256
    parts = torch.split(words[:full].view(-1, _ROW), chunk)
    sums = [_row_sums(rows, weights) for rows in parts if len(rows)]
    sums.append(_row_sums(words[None, full:], weights[: len(words) - full]))
    rows = torch.cat(sums)
    return (rows * _weights(len(rows), tensor.device)).sum()


def words_of(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as words of one, two or four bytes, `[N]`; no copy if dense."""
    return tensor.contiguous().view(-1).view(_WORDS.get(tensor.element_size(), torch.int32))


def _row_sums(rows: Tensor, weights: Tensor) -> Tensor:
    words = rows.int()
    # products have 32 bits: without mixing into lower bits the highest would not depend on the
    # weight, and two flipped signs would cancel
    mixed = words >> 15
    mixed &= 2**17 - 1
    mixed ^= words
    mixed *= weights
    return mixed.sum(dim=1, dtype=torch.int64)


@functools.lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> Tensor:
    # cached tensors must not be of inference mode
    with torch.inference_mode(False):
        mixed = torch.arange(1, count + 1, device=device) * _MIX
        weights = (mixed ^ (mixed >> 29)) * _MIX | 1
    if device.type == "cuda":
        # another stream may read it next
        torch.cuda.current_stream(device).synchronize()
    return weights
