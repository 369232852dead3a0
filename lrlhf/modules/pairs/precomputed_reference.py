"""Log-probabilities of a reference that were computed before training, row by row."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from lrlhf.run import Collectives
from lrlhf.types import SequenceBatch


class PrecomputedReference:
    """What a reference said of rows, found again by what these consist of.

    Neither the order of rows, nor the ranks that they are shared out to, nor their padding plays a
    part. Kept in main memory: four bytes for each token of an answer in single precision.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, Tensor] = {}

    def add(self, rows: SequenceBatch, logprobs: Float[Tensor, "B T"]) -> None:
        """Keep what belongs to the answers of some rows."""
        masks, found = rows.response_mask.cpu(), logprobs.cpu()
        for row, key in enumerate(_keys(rows)):
            self._known[key] = found[row, masks[row]]

    def share(self, ranks: Collectives) -> None:
        """Have the rows of all ranks on every rank; all call."""
        for known in ranks.gather(self._known):
            self._known |= known

    def logprobs(self, rows: SequenceBatch) -> Float[Tensor, "B T"]:
        """Return the log-probabilities of the answers, 0 elsewhere.

        Raises:
            ValueError: A row is not among those that were added.
        """
        given = [self._known.get(key) for key in _keys(rows)]
        if any(one is None for one in given):
            raise ValueError(
                "the reference was asked about the rows of the data that training began with, and "
                "this is another: leave precompute_reference out, or build the module anew"
            )
        known = [one for one in given if one is not None]
        masks = rows.response_mask
        found = torch.zeros(masks.shape, dtype=known[0].dtype, device=masks.device)
        found[masks] = torch.cat(known).to(masks.device)
        return found


def _keys(rows: SequenceBatch) -> Iterator[bytes]:
    """Yield what tells each row from others: its tokens, its answer, and what it shows."""
    ids, there, masks = rows.input_ids.cpu(), rows.attention_mask.cpu(), rows.response_mask.cpu()
    for row in range(len(rows)):
        digest = hashlib.blake2b(digest_size=16)
        digest.update(ids[row, there[row]].numpy().tobytes())
        digest.update(masks[row, there[row]].numpy().tobytes())
        media = None if rows.media is None else rows.media[row]
        for name, tensor in sorted(media.tensors.items()) if media is not None else ():
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        yield digest.digest()
