"""Makes the gradient of one optimizer step the mean over its pairs, however they were split."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lrlhf.run.collectives import Collectives


class ClosedWindow(NamedTuple):
    """What one optimizer step was made of."""

    correction: float
    """What the accumulated gradients must be multiplied by."""
    finite: bool
    """Whether every loss on every rank was finite."""


@dataclass
class GradientWindow:
    """The micro-batches between two optimizer steps.

    Lightning divides each loss by ``accumulate_grad_batches`` and averages gradients over the
    ranks. That is the mean over all pairs only while every micro-batch of every rank is of one
    size and the window is full; the last one of an epoch is often neither. So each micro-batch
    contributes its summed loss over one common number of pairs, and the gradients are corrected
    once, by a factor that is exactly 1 in the regular case.
    """

    _reference: float = 0.0
    _pairs: int = 0
    _finite: list[Tensor] = field(default_factory=list)

    def add(self, loss_sum: Tensor, pairs: int, ranks: Collectives) -> Tensor:
        """Add a micro-batch; returns the loss to run backward from.

        Args:
            loss_sum: Sum of the losses of its pairs.
            pairs: How many there are, unlabelled ones included.
            ranks: All ranks; each of them adds its own micro-batch.
        """
        if self._pairs == 0:
            here = torch.tensor(float(pairs), device=loss_sum.device)
            self._reference = float(pairs if ranks.world_size == 1 else ranks.max(here))
        self._pairs += pairs
        self._finite.append(loss_sum.detach().isfinite())
        return loss_sum / self._reference

    def close(self, accumulated: int, ranks: Collectives) -> ClosedWindow:
        """End the window at an optimizer step.

        Args:
            accumulated: What Lightning divided each loss by.
            ranks: All ranks; each of them closes its window at the same step.
        """
        infinite = (~torch.stack(self._finite)).sum().float()
        pairs = torch.full_like(infinite, float(self._pairs))
        total_infinite, total_pairs = ranks.sum(torch.stack([infinite, pairs])).tolist()
        correction = accumulated * self._reference * ranks.world_size / total_pairs
        self._reference, self._pairs, self._finite = 0.0, 0, []
        return ClosedWindow(correction, finite=total_infinite == 0)
