"""CISPO: GRPO's advantages, REINFORCE with a bounded importance weight, no KL penalty.

    L = -mean over tokens of sg(min(ρ_it, ratio_max)) A_i log π(y_it)

The lower bound of eq. 5 is left out: the paper sets it so that it never acts.

Reference:
    MiniMax 2025, eq. 4-5, https://arxiv.org/abs/2506.13585
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lrlhf.functional.algorithm import Algorithm, PolicyLoss
from lrlhf.functional.algorithms.grpo import GROUP_Z_SCORE
from lrlhf.functional.policy import kept_inside, token_ratio


def cispo_policy_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    ratio_max: float = 5.0,
) -> Float[Tensor, "B T"]:
    """REINFORCE with a bounded importance weight, so that no token loses its gradient.

        ℓ = -sg(min(ρ, ratio_max)) · A · logprobs

    Args:
        logprobs: Under the policy being trained.
        old_logprobs: Under the policy that the ratio starts from; no gradient.
        advantages: No gradient.
        response_mask: Outside it the loss is 0.
        ratio_max: Largest weight.

    Raises:
        ValueError: ``ratio_max`` is not positive.

    Reference:
        MiniMax 2025 (CISPO), eq. 4-5, https://arxiv.org/abs/2506.13585
    """
    if ratio_max <= 0:
        raise ValueError(f"ratio_max is {ratio_max}; it must be above 0")
    weight = token_ratio(logprobs, old_logprobs, response_mask).detach().clamp(max=ratio_max)
    return (
        -weight * kept_inside(advantages, response_mask) * torch.where(response_mask, logprobs, 0.0)
    )


ALGORITHM = Algorithm(
    name="cispo",
    estimator=GROUP_Z_SCORE,
    loss=PolicyLoss("cispo", cispo_policy_loss, options={"ratio_max": 5.0}),
    kl_coef=0.0,
)
