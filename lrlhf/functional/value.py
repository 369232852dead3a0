"""The loss of the value function."""

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
    """Squared error per token, pessimistic about moves beyond the clip range.

        ½ · max((V - R)², (V_old + clip(V - V_old, ±range) - R)²)

    Args:
        values: Of the value function that is trained.
        old_values: When the rollout was taken; no gradient flows into them.
        returns: Regression target; no gradient flows into it.
        response_mask: The loss outside it is 0.
        value_clip_range: Largest move that counts; None: no clipping.

    Reference:
        Schulman et al., OpenAI baselines PPO2; Engstrom et al. 2020, section 3,
        https://arxiv.org/abs/2005.12729
    """
    target = returns.detach()
    loss = (values - target).square()
    if value_clip_range is not None:
        old = old_values.detach()
        clipped = old + (values - old).clamp(-value_clip_range, value_clip_range)
        loss = torch.maximum(loss, (clipped - target).square())
    return torch.where(response_mask, loss / 2, torch.zeros_like(loss))
