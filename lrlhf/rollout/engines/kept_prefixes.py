"""Keys and values of a conversation so far, for the turns that go on from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lrlhf.rollout.responses import Response, left_padded, prompt_token_ids
from lrlhf.types import PromptBatch


class Continued(NamedTuple):
    """Prompts whose beginnings need not be computed again."""

    input_ids: Int[Tensor, "B W"]
    """What is kept, with gaps where shorter responses ended, then what is new."""
    mask: Int[Tensor, "B W"]
    """1 on the tokens of the prompts."""
    cache: DynamicCache
    """Of the first columns."""


class KeptPrefixes:
    """What the last turns of several conversations left in a model's cache.

    A turn would otherwise compute all turns before it once more. Only caches of full attention are
    kept, whose rows may have gaps.
    """

    def __init__(self) -> None:
        self._cache: DynamicCache | None = None
        self._ids = torch.zeros(0, 0, dtype=torch.long)
        self._mask = torch.zeros(0, 0, dtype=torch.bool)
        self._prompts: list[int] = []
        """Tokens of each row's prompt."""

    def keep(
        self,
        cache: DynamicCache,
        sequences: Int[Tensor, "B W"],
        prompt_mask: Int[Tensor, "B P"],
        responses: Sequence[Response],
    ) -> None:
        """Keep what a call has computed.

        Args:
            cache: Of all columns but the last ones.
            sequences: Prompts and responses, as they were generated.
            prompt_mask: 1 on the tokens of the prompts.
            responses: What belongs to each row behind its prompt.
        """
        self._cache = None
        if not all(type(layer) is DynamicLayer for layer in cache.layers):
            return
        lengths = torch.tensor([len(one.token_ids) for one in responses], device=sequences.device)
        behind = torch.arange(sequences.shape[1] - prompt_mask.shape[1], device=sequences.device)
        mask = torch.cat([prompt_mask.bool(), behind < lengths[:, None]], dim=1)
        columns = cache.get_seq_length()
        self._cache = cache
        self._ids, self._mask = sequences[:, :columns], mask[:, :columns]
        self._prompts = prompt_mask.sum(dim=1).tolist()

    def continued(self, prompts: PromptBatch) -> Continued | None:
        """Return prompts that go on from what is kept; None: some of them do not.

        What nobody goes on from is dropped.
        """
        cache, self._cache = self._cache, None
        if cache is None:
            return None
        kept = [ids[mask] for ids, mask in zip(self._ids, self._mask, strict=True)]
        rows: list[int] = []
        lengths, new = [], []
        for ids in prompt_token_ids(prompts):
            found = self._find(ids, kept, (rows[-1] + 1) if rows else 0)
            if found is None:
                return None
            row, length = found
            rows.append(row)
            lengths.append(length)
            new.append(ids[length:])
        chosen = torch.tensor(rows, device=self._ids.device)
        cache.batch_select_indices(chosen)
        before = self._mask[chosen]
        # of a response that was cut, the end is not gone on from
        before &= before.cumsum(dim=1) <= torch.tensor(lengths, device=before.device)[:, None]
        ids, mask = left_padded(new)
        return Continued(
            torch.cat([self._ids[chosen], ids], dim=1),
            torch.cat([before, mask], dim=1).long(),
            cache,
        )

    def _find(self, ids: Tensor, kept: Sequence[Tensor], first: int) -> tuple[int, int] | None:
        """Return which row a prompt goes on from, and how many of its tokens."""
        for row in range(first, len(kept)):
            if _common(ids, kept[row]) == len(kept[row]):
                return row, len(kept[row])
        if first < len(kept) and (common := _common(ids, kept[first])) >= self._prompts[first]:
            return first, common
        return None


def _common(ids: Tensor, kept: Tensor) -> int:
    """Count the tokens that two rows begin with alike; one of ``ids`` is left to be computed."""
    length = min(len(ids) - 1, len(kept))
    different = (ids[:length] != kept[:length]).nonzero()
    return int(different[0]) if len(different) else length
