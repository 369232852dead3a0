"""Makes the gradient of one optimizer step the mean over its pairs, however they were split."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lrlhf.modules.pairs.pair_batches import PairScores
from lrlhf.run.collectives import Collectives
from lrlhf.types import PreferenceBatch


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
        """Add a micro-batch; returns the loss to run backward from.

        Args:
            loss_sum: Sum of the losses of its pairs.
            taken: What it was; held, not copied.
            ranks: All ranks; each of them adds its own micro-batch.
        """
        if not self.micro_batches:
            pairs = torch.tensor(float(len(taken.batch)), device=loss_sum.device)
            self._common = float(ranks.max(pairs)) if ranks.world_size > 1 else len(taken.batch)
        self.micro_batches.append(taken)
        self._infinite.append(~loss_sum.detach().isfinite())
        return loss_sum / self._common

    def close(self, accumulated: int, ranks: Collectives) -> PairMean:
        """Finish at an optimizer step.

        Args:
            accumulated: What Lightning divided each loss by.
            ranks: All ranks; each of them takes the same step.
        """
        infinite = torch.stack(self._infinite).sum().float()
        pairs = torch.full_like(infinite, sum(len(one.batch) for one in self.micro_batches))
        total_infinite, total_pairs = ranks.sum(torch.stack([infinite, pairs])).tolist()
        correction = accumulated * self._common * ranks.world_size / total_pairs
        return PairMean(correction, finite=total_infinite == 0)
