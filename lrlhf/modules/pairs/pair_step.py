"""Pairs as one batch of rows, and a gradient that is their mean, however they were split."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from lrlhf.run.collectives import Collectives
from lrlhf.types import PreferenceBatch, SequenceBatch, joined_media


class PairScores(NamedTuple):
    """Scores of both candidates of every pair, [B, H] each."""

    candidate0: Tensor
    candidate1: Tensor


def concatenate(first: SequenceBatch, second: SequenceBatch, *, pad_id: int) -> SequenceBatch:
    """Stack the rows of two batches, right-padded to one length.

    Rows with the same place in both may begin with the same tokens, and are marked so.
    """
    length = max(first.input_ids.shape[1], second.input_ids.shape[1])

    def stacked(column: str, value: int | bool) -> Tensor:
        parts = [getattr(batch, column) for batch in (first, second)]
        return torch.cat(
            [functional.pad(part, (0, length - part.shape[1]), value=value) for part in parts]
        )

    return SequenceBatch(
        input_ids=stacked("input_ids", pad_id),
        attention_mask=stacked("attention_mask", value=False),
        response_mask=stacked("response_mask", value=False),
        media=joined_media([first, second]),
        group_ids=torch.arange(len(first)).repeat(2),
    )


def pad_id_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return an id for padding."""
    # every tokenizer that lrlhf loads has one; padding is masked, so any id would do
    pad_id = tokenizer.pad_token_id
    return pad_id if isinstance(pad_id, int) else 0


class MicroBatch(NamedTuple):
    """One forward pass of an optimizer step, for the guard."""

    batch: PreferenceBatch
    """The pairs, as the loader delivered them: images are not kept on the device."""
    scores: PairScores
    """Where they were computed, without gradient."""
    seed: tuple[int, ...]
    """Arguments of `seed_everything_for` before it."""


class PairMean(NamedTuple):
    """What turns the accumulated gradients into those of the mean."""

    correction: float
    """What they must be multiplied by."""
    finite: bool
    """Whether every loss on every rank was finite."""


@dataclass
class PairStep:
    """The micro-batches between two optimizer steps.

    Lightning divides each loss by ``accumulate_grad_batches`` and averages gradients over the
    ranks. That is the mean over all pairs only while every micro-batch of every rank is of one
    size and there are as many as expected; the last ones of an epoch are often neither. So each
    micro-batch contributes its summed loss over one common number of pairs, and the gradients are
    corrected once, by a factor that is exactly 1 in the regular case.
    """

    micro_batches: list[MicroBatch] = field(default_factory=list)
    _common: float = 0.0
    _infinite: list[Tensor] = field(default_factory=list)

    def add(self, loss_sum: Tensor, taken: MicroBatch, ranks: Collectives) -> Tensor:
        """Add a micro-batch, as every rank does its own; return the loss to run backward from.

        Args:
            loss_sum: Sum of the losses of its pairs.
            taken: What it was; held, not copied.
            ranks: All ranks.
        """
        if not self.micro_batches:
            pairs = torch.tensor(float(len(taken.batch)), device=loss_sum.device)
            self._common = float(ranks.max(pairs)) if ranks.world_size > 1 else len(taken.batch)
        self.micro_batches.append(taken)
        self._infinite.append(~loss_sum.detach().isfinite())
        return loss_sum / self._common

    def close(self, accumulated: int, ranks: Collectives) -> PairMean:
        """Finish at an optimizer step, which all ranks take; Lightning ``accumulated`` so many."""
        infinite = torch.stack(self._infinite).sum().float()
        pairs = torch.full_like(infinite, sum(len(one.batch) for one in self.micro_batches))
        total_infinite, total_pairs = ranks.sum(torch.stack([infinite, pairs])).tolist()
        correction = accumulated * self._common * ranks.world_size / total_pairs
        return PairMean(correction, finite=total_infinite == 0)
