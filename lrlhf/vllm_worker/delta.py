"""Changes of tensors since an earlier push: positions and new values, without loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lrlhf.vllm_worker.fingerprint import words_of

_MARK = " changed "
"""Separates a tensor's name, which has no spaces, from the number of its changed words."""
_SKIP = 255
"""Code for so many unchanged words without a changed one after them."""


def changes(
    tensors: Iterable[tuple[str, Tensor]], held: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield what changed against copies in main memory, bit for bit, for `apply_changes`.

    Unchanged tensors are left out. Of others the changed words (of one, two or four bytes) are
    yielded as bytes: the new values, and before each one byte for the number of unchanged words
    (more from 255 on). A tensor is yielded whole where this would not halve its bytes, and where it
    has no copy of its type and shape. The copies in ``held`` become equal to the tensors.
    """
    for name, tensor in tensors:
        words = words_of(tensor.detach()).cpu()
        old = held.get(name)
        if old is None or (old.dtype, old.shape) != (tensor.dtype, tensor.shape):
            held[name] = words.clone().view(tensor.dtype).view(tensor.shape)
            yield name, held[name]
            continue
        own = words_of(old)
        changed = words != own
        count = int(changed.count_nonzero())
        if not count:
            continue
        own.copy_(words)
        # positions take several times the bytes of the words that they spare
        if 2 * count * (own.element_size() + 1) <= own.nbytes:
            yield f"{name}{_MARK}{count}", _payload(words, changed)
        else:
            yield name, old


def apply_changes(held: dict[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Update copies in main memory with the result of `changes`."""
    for marked, received in tensors:
        name, _, count = marked.partition(_MARK)
        if not count:
            held[name] = received.to("cpu", copy=True)
            continue
        words, payload = words_of(held[name]), received.cpu()
        size = int(count) * words.element_size()
        # a copy is aligned to its type
        words[_positions(payload[size:])] = payload[:size].clone().view(words.dtype)


def _payload(words: Tensor, changed: Tensor) -> Tensor:
    positions = changed.nonzero()[:, 0]
    gaps = positions.diff(prepend=positions.new_tensor([-1])) - 1
    skips = gaps // _SKIP
    codes = torch.full((len(gaps) + int(skips.sum()),), _SKIP, dtype=torch.uint8)
    codes[(skips + 1).cumsum(0) - 1] = (gaps % _SKIP).to(torch.uint8)
    return torch.cat([words[positions].view(torch.uint8), codes])


def _positions(codes: Tensor) -> Tensor:
    ends = codes != _SKIP
    return ((codes.long() + ends).cumsum(0) - 1)[ends]
