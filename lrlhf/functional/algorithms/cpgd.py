"""CPGD: weighted group advantages, clipped log-probabilities, a drift that pulls to the old policy.

    A_i = w_group · (R_i - mean of the group)
    A > 0:  L = -min(log π, log π_old + log(1 + ε)) A  +  α D
    A ≤ 0:  L = -max(log π, log π_old + log(1 - ε)) A  +  α D,      D = ρ - 1 - log ρ

Reference:
    Liu et al. 2025, §4, https://arxiv.org/abs/2505.12504
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lrlhf.functional.advantages import group_mean_advantages
from lrlhf.functional.algorithm import (
    Algorithm,
    Estimator,
    EstimatorInputs,
    PolicyLoss,
    penalized_scores,
    spread_over_tokens,
)
from lrlhf.functional.names import unknown_name
from lrlhf.functional.policy import kept_inside, token_ratio

CPGD_WEIGHTINGS = ("equal", "std", "clip_filter")


def cpgd(
    inputs: EstimatorInputs,
    *,
    weighting: str = "std",
    max_weight: float = 3.0,
    eps: float = 1e-6,
) -> Float[Tensor, "B T"]:
    """Score minus the group's mean, times a weight of its group; the same for every token.

        equal         1
        std           1 / (std of the group + eps)
        clip_filter   min(rows / rows with an advantage, max_weight), equal for all groups: what
                      filtering out the groups without a difference would do to a mean

    Args:
        inputs: Scores of the rollout, and KL where it is to go into the reward.
        weighting: One of the above.
        max_weight: Bound of ``clip_filter``.
        eps: Added to the standard deviation (biased, as in the paper's code), in score units.

    Raises:
        ValueError: Unknown weighting, or a bound below 1.

    Reference:
        Liu et al. 2025 (CPGD), §4.3, https://arxiv.org/abs/2505.12504
    """
    if weighting not in CPGD_WEIGHTINGS:
        raise unknown_name("cpgd weighting", weighting, CPGD_WEIGHTINGS)
    if max_weight < 1:
        raise ValueError(f"max_weight is {max_weight}; it must be 1 or more")
    scores, size = penalized_scores(inputs), inputs.num_generations
    if weighting == "std":
        # biased and unbiased deviations differ by a factor that depends on the group's size only
        counted = (~scores.isnan()).view(-1, size).sum(dim=1, keepdim=True)
        advantages = group_mean_advantages(scores, num_generations=size).view(-1, size)
        variance = advantages.square().sum(dim=1, keepdim=True) / counted.clamp(min=1)
        return spread_over_tokens((advantages / (variance.sqrt() + eps)).flatten(), inputs)
    advantages = group_mean_advantages(scores, num_generations=size)
    if weighting == "clip_filter":
        different = (advantages != 0).sum().clamp(min=1)
        counted = (~scores.isnan()).sum()
        advantages = advantages * (counted / different).clamp(max=max_weight)
    return spread_over_tokens(advantages, inputs)


def cpgd_policy_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    clip_range: float = 0.2,
    drift_coef: float = 0.0,
    drift_clip: float = 5.0,
) -> Float[Tensor, "B T"]:
    """Policy gradient that clips log-probabilities instead of ratios, with a drift penalty.

        A > 0:  ℓ = -min(logprobs, old + log(1 + ε)) A  +  α D
        A ≤ 0:  ℓ = -max(logprobs, old + log(1 - ε)) A  +  α D

    with the policy drift D = ρ - 1 - log ρ, an estimate of KL(old || new), whose gradient
    (ρ - 1) ∇logprobs is bounded: a ratio ρ that ran away would dominate the batch.

    Args:
        logprobs: Under the policy being trained.
        old_logprobs: Under the policy that the bounds are taken from; no gradient.
        advantages: No gradient.
        response_mask: Outside it the loss is 0.
        clip_range: ε, above 0 and below 1.
        drift_coef: α, 0 or more.
        drift_clip: Largest factor ρ - 1 in the drift's gradient, above 0.

    Raises:
        ValueError: An option out of range.

    Reference:
        Liu et al. 2025 (CPGD), §4, https://arxiv.org/abs/2505.12504
    """
    if not 0 < clip_range < 1:
        raise ValueError(f"clip_range is {clip_range}; it must lie between 0 and 1")
    if drift_coef < 0 or drift_clip <= 0:
        raise ValueError(
            f"drift_coef is {drift_coef} and drift_clip {drift_clip}; the first must be 0 or "
            "more, the second above 0"
        )
    advantages, old = (
        kept_inside(advantages, response_mask),
        kept_inside(old_logprobs, response_mask),
    )
    logprobs = torch.where(response_mask, logprobs, 0.0)
    risen = torch.minimum(logprobs, old + math.log1p(clip_range))
    fallen = torch.maximum(logprobs, old + math.log1p(-clip_range))
    gain = torch.where(advantages > 0, risen, fallen) * advantages
    if drift_coef == 0:
        return -gain
    ratio = token_ratio(logprobs, old, response_mask).detach()
    drift = ratio - 1 - ratio.log()
    slope = (ratio - 1).clamp(max=drift_clip)
    # the drift's value, with the bounded gradient
    return drift_coef * (drift + slope * (logprobs - logprobs.detach())) - gain


ALGORITHM = Algorithm(
    name="cpgd",
    estimator=Estimator(cpgd, groups=True),
    loss=PolicyLoss(
        "cpgd",
        cpgd_policy_loss,
        aggregate="sequence_mean",
        options={"clip_range": 0.2, "drift_coef": 0.0},
    ),
)
