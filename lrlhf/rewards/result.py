"""What all rewards said about one batch of responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lrlhf.rewards.function import RewardError


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """Scores of a batch of responses, and where they come from."""

    scores: Float[Tensor, " B"]
    """Weighted sum of what the functions returned; NaN: none of them could score the response."""
    per_function: Float[Tensor, "B K"]
    """What each function returned, unweighted; NaN: nothing."""
    names: tuple[str, ...]
    """Names of the functions, one per column of ``per_function``."""
    metrics: dict[str, float]
    """Logged by the functions, and for each the fraction of responses that it left unscored."""
    extras: dict[str, list[Any]]
    """Columns that the functions logged, one value per response."""
    failures: list[str]
    """What went wrong in this batch, tracebacks included; begins with the function's name."""


def weighted_sum(
    per_function: Float[Tensor, "B K"], weights: Float[Tensor, "B K"]
) -> Float[Tensor, " B"]:
    """Add up what counts, per response.

    Args:
        per_function: Values, NaN where a function has none.
        weights: NaN where a function was not asked; a weight of 0 only logs, so that a response
            with no other value is unscorable.

    Returns:
        Float32 sums; NaN where nothing counts.

    Raises:
        RewardError: A sum is too large for float32.
    """
    counts = per_function.isfinite() & weights.isfinite() & (weights != 0)
    terms = torch.where(counts, per_function.double() * weights, 0.0)
    scores = terms.sum(dim=1).float()
    if scores.isinf().any():
        row = int(scores.isinf().nonzero()[0])
        raise RewardError(
            f"the weighted rewards of response {row} add up to more than float32 can hold: "
            f"{per_function[row].tolist()}; scale the reward functions down"
        )
    return torch.where(counts.any(dim=1), scores, torch.nan)
