"""What all rewards said about one batch of responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lrlhf.rewards.function import RewardError


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """Scores of a batch of responses, and where they come from."""

    scores: Float[Tensor, " B"]
    """Weighted sum of what the functions returned; NaN: a part of it is missing."""
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
    per_function: Float[Tensor, "B K"],
    weights: Float[Tensor, "B K"],
    *,
    optional: Bool[Tensor, " K"],
) -> Float[Tensor, " B"]:
    """Add up what counts, per response.

    A sum without one of its parts cannot be compared with others: beside a penalty, it would rank
    a response that a reward model failed to score above those that it scored low.

    Args:
        per_function: Values, NaN where a function has none.
        weights: NaN where a function was not asked; a weight of 0 only logs.
        optional: The functions whose value may be missing, so that the others' count alone.

    Returns:
        Float32 sums; NaN where a value is missing that is not optional, or where nothing counts.

    Raises:
        RewardError: A sum is too large for float32.
    """
    wanted = weights.isfinite() & (weights != 0)
    counts = per_function.isfinite() & wanted
    terms = torch.where(counts, per_function.double() * weights, 0.0)
    scores = terms.sum(dim=1).float()
    if scores.isinf().any():
        row = int(scores.isinf().nonzero()[0])
        raise RewardError(
            f"the weighted rewards of response {row} add up to more than float32 can hold: "
            f"{per_function[row].tolist()}; scale the reward functions down"
        )
    complete = (counts | ~wanted | optional).all(dim=1)
    return torch.where(complete & counts.any(dim=1), scores, torch.nan)
