"""The loss of a value function."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def clipped_value_loss(
    values: Float[Tensor, "B T"],
    old_values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    value_clip_range: float | None = None,
) -> Float[Tensor, "B T"]:
    """PPO's value loss with value clipping: the larger of the plain and the clipped squared error.

        ℓ = ½ max((v - R)², (clip(v, old - ε, old + ε) - R)²)

    Args:
        values: Under the value function being trained.
        old_values: When the rollout was taken; no gradient.
        returns: Regression targets; no gradient.
        response_mask: Outside it the loss is 0.
        value_clip_range: ε, in units of the values; None: plain squared error.

    Raises:
        ValueError: ``value_clip_range`` is not positive.

    Reference:
        Schulman et al. 2017 in the form of OpenAI's baselines, see Huang et al. 2022, detail 9,
        https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/
    """
    if value_clip_range is not None and value_clip_range <= 0:
        raise ValueError(f"value_clip_range is {value_clip_range}; it must be above 0, or None")
    targets = torch.where(response_mask, returns.detach(), 0.0)
    values = torch.where(response_mask, values, 0.0)
    error = (values - targets).square()
    if value_clip_range is not None:
        old = torch.where(response_mask, old_values.detach(), 0.0)
        clipped = torch.clamp(values, old - value_clip_range, old + value_clip_range)
        error = torch.maximum(error, (clipped - targets).square())
    return error / 2
