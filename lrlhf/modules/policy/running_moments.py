"""Mean and deviation of all scores of a run so far."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from lrlhf.run import Collectives

ScaleRewards: TypeAlias = Literal["none", "std", "mean_std"]


class ScoreMoments(NamedTuple):
    """Mean and deviation that scores, and values of them, are measured against."""

    mean: float
    deviation: float

    def scaled(self, scores: Float[Tensor, " B"], mode: ScaleRewards) -> Float[Tensor, " B"]:
        """Divide by the deviation, and with ``mean_std`` subtract the mean before."""
        if mode == "none":
            return scores
        centre = self.mean if mode == "mean_std" else 0.0
        return (scores - centre) / self.deviation

    def scaled_parts(self, parts: Float[Tensor, "B T"], mode: ScaleRewards) -> Float[Tensor, "B T"]:
        """Divide what is only a part of a score; the mean goes off the rest of it."""
        return parts if mode == "none" else parts / self.deviation

    def as_they_enter(self, mode: ScaleRewards) -> ScoreMoments:
        """Return the moments of the scores after `scaled`."""
        if mode == "none":
            return self
        centre = 0.0 if mode == "mean_std" else self.mean
        return ScoreMoments(centre / self.deviation, 1.0)


UNSCALED = ScoreMoments(mean=0.0, deviation=1.0)


class RunningMoments:
    """Counts scores over all ranks and iterations.

    A batch is counted before it is scaled, so the first one is scaled by its own deviation.
    """

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self.squares = 0.0
        """Sum of the squared distances from the mean."""

    @property
    def deviation(self) -> float:
        """Standard deviation (Bessel-corrected); 1 before two scores are known."""
        if self.count < 2 or self.squares <= 0:
            return 1.0
        return float((self.squares / (self.count - 1)) ** 0.5)

    def update(self, scores: Float[Tensor, " B"], collectives: Collectives) -> ScoreMoments:
        """Count the finite scores of all ranks; returns the moments with them.

        Reference:
            Chan, Golub, LeVeque 1979, eq. 2.1 (combining the moments of two samples)
        """
        finite = scores[scores.isfinite()].double()
        total = collectives.sum(torch.stack([finite.sum(), torch.ones_like(finite).sum()]))
        count = float(total[1])
        if count == 0:
            return self.moments
        mean = float(total[0]) / count
        squares = float(collectives.sum((finite - mean).square().sum()))
        distance = mean - self.mean
        combined = self.count + count
        self.squares += squares + distance**2 * self.count * count / combined
        self.mean += distance * count / combined
        self.count = combined
        return self.moments

    @property
    def moments(self) -> ScoreMoments:
        """Mean and deviation so far."""
        return ScoreMoments(self.mean, self.deviation)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``."""
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]
