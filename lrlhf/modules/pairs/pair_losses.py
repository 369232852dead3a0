"""The loss of every label of a batch of pairs, put together from `lrlhf.functional.reward`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from lrlhf.functional.names import import_function
from lrlhf.functional.reward import (
    bradley_terry_loss,
    center_penalty,
    hps_loss,
    log_exp_loss,
    tie_loss,
)

PairLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""From the scores [N] of the chosen and the rejected candidates to a loss [N]."""

PAIR_LOSSES: dict[str, PairLoss] = {
    "bradley_terry": bradley_terry_loss,
    "log_exp": log_exp_loss,
    "hps": hps_loss,
}
NAMES_ELSEWHERE = {"sigmoid": "bradley_terry", "logsigmoid": "bradley_terry", "logexp": "log_exp"}


@dataclass(frozen=True, kw_only=True)
class PairObjective:
    """Loss of one label: a preference, a tie, or nothing where there is no label.

        preference:  (1 - s) ℓ(c - m, r) + s ℓ(r, c - m) + k (c + r)²
        tie:         w |c - r| + k (c + r)²

    with chosen and rejected scores c and r, ℓ the weighted sum of ``losses``, margin m,
    label smoothing s, tie weight w and centering k.

    Args:
        losses: Pair losses and their weights.
        margin: Gap that the chosen score should keep; a margin of the pair itself replaces it.
        tie_weight: Weight of a tie's loss beside a preference's.
        center_coef: Strength of the pull of c + r towards 0.
        label_smoothing: Probability that a label is wrong, below 0.5.
        takes_margins: Whether margins count, those of pairs included.
    """

    losses: tuple[tuple[PairLoss, float], ...]
    margin: float = 0.0
    tie_weight: float = 0.01
    center_coef: float = 0.0
    label_smoothing: float = 0.0
    takes_margins: bool = True

    def __post_init__(self) -> None:
        for name in ("tie_weight", "center_coef"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 or more")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing is {self.label_smoothing}, expected 0 or more and below 0.5"
            )

    def __call__(
        self,
        scores0: Float[Tensor, "B H"],
        scores1: Float[Tensor, "B H"],
        labels: Float[Tensor, "B H"],
        margin: Float[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B H"]:
        """Return the loss of every label, 0 where there is none.

        Args:
            scores0: Scores of candidate 0 by head.
            scores1: Scores of candidate 1 by head.
            labels: 1: candidate 0 is better, -1: candidate 1, 0: equal, NaN: not labelled.
            margin: Margin of each pair; NaN or None: the constant one.
        """
        flipped = labels < 0
        chosen = torch.where(flipped, scores1, scores0).flatten()
        rejected = torch.where(flipped, scores0, scores1).flatten()
        loss = self._preference(chosen - self._margin(labels, margin), rejected)
        tied = self.tie_weight * tie_loss(chosen, rejected)
        loss = torch.where(labels.flatten() == 0, tied, loss)
        if self.center_coef:
            loss = loss + self.center_coef * center_penalty(chosen, rejected)
        # where, not a product with the mask: an unlabelled entry's loss may be infinite
        return torch.where(labels.isnan(), torch.zeros_like(scores0), loss.view_as(scores0))

    def _preference(self, shifted: Tensor, rejected: Tensor) -> Tensor:
        loss = torch.zeros_like(rejected)
        for function, weight in self.losses:
            loss = loss + weight * (1 - self.label_smoothing) * function(shifted, rejected)
            if self.label_smoothing:
                loss = loss + weight * self.label_smoothing * function(rejected, shifted)
        return loss

    def _margin(self, labels: Tensor, margin: Tensor | None) -> Tensor | float:
        if margin is None or not self.takes_margins:
            return self.margin
        own = torch.where(margin.isnan(), torch.full_like(margin, self.margin), margin)
        return own[:, None].expand_as(labels).flatten()


def resolve_losses(loss: str | Mapping[str, float]) -> tuple[tuple[PairLoss, float], ...]:
    """Look up pair losses by name or dotted path.

    Args:
        loss: A name of `PAIR_LOSSES`, the dotted path of a `PairLoss`, or a mix: weights by either.

    Raises:
        ValueError: Unknown name, or a path that leads to nothing that can be called.
    """
    mix = {loss: 1.0} if isinstance(loss, str) else dict(loss)
    if not mix:
        raise ValueError(f"loss is empty, expected one of {', '.join(PAIR_LOSSES)}, or a mix")
    for name in mix.keys() & NAMES_ELSEWHERE.keys():
        raise ValueError(f"unknown loss {name!r}; did you mean {NAMES_ELSEWHERE[name]!r}?")
    return tuple(
        (PAIR_LOSSES.get(name) or import_function("loss", name, PAIR_LOSSES), float(weight))
        for name, weight in mix.items()
    )
