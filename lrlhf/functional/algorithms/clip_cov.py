"""Clip-Cov: GRPO without the gradient of a few tokens whose covariance is large, no KL penalty.

    c_t = (log π(y_t) - mean) (A_t - mean)        over the tokens of the batch
    of the tokens with low < c_t < high, fraction · N by chance have no gradient
    L   = -mean over tokens of min(ρ_t A_t, clip(ρ_t, 1 - ε, 1 + ε) A_t)

Reference:
    Cui et al. 2025, §4.2, https://arxiv.org/abs/2505.22617

Differs from the paper: the log-probabilities are those before the update, and the batch is the
whole rollout of all processes, so that no split of the update changes the choice.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lrlhf.functional.algorithm import Algorithm, PolicyLoss
from lrlhf.functional.algorithms.grpo import GROUP_Z_SCORE
from lrlhf.functional.policy import clipped_policy_loss


def choose_clipped(
    covariance: Float[Tensor, " N"],
    generator: torch.Generator,
    *,
    fraction: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Bool[Tensor, " N"]:
    """Choose ``fraction`` of all tokens, and one at least, among those between the bounds.

    Args:
        covariance: See `lrlhf.functional.policy.token_covariance`.
        generator: Of the choice by chance.
        fraction: Share of all tokens to choose.
        cov_low: Covariance above which a token may be chosen.
        cov_high: Covariance below which a token may be chosen.

    Reference:
        Cui et al. 2025, §4.2, https://arxiv.org/abs/2505.22617; the defaults are verl's
    """
    candidates = ((covariance > cov_low) & (covariance < cov_high)).nonzero().flatten()
    count = max(int(fraction * len(covariance)), 1)
    taken = candidates[torch.randperm(len(candidates), generator=generator)[:count]]
    chosen = torch.zeros(len(covariance), dtype=torch.bool)
    chosen[taken] = True
    return chosen


def clip_cov_policy_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    covariant: Bool[Tensor, "B T"],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Float[Tensor, "B T"]:
    """PPO's clipped surrogate, 0 on the chosen tokens.

    Args:
        logprobs: Under the policy being trained.
        old_logprobs: Under the policy that the ratio starts from; no gradient.
        advantages: No gradient.
        response_mask: Outside it the loss is 0.
        covariant: Tokens that `choose_clipped` has chosen.
        clip_low: ε_low of the clip range [1 - ε_low, 1 + ε_high].
        clip_high: ε_high.

    Reference:
        Cui et al. 2025, §4.2, https://arxiv.org/abs/2505.22617
    """
    loss = clipped_policy_loss(
        logprobs, old_logprobs, advantages, response_mask, clip_low=clip_low, clip_high=clip_high
    )
    return torch.where(covariant, 0.0, loss)


ALGORITHM = Algorithm(
    name="clip_cov",
    estimator=GROUP_Z_SCORE,
    loss=PolicyLoss(
        "clip_cov",
        clip_cov_policy_loss,
        options={
            "clip_low": 0.2,
            "clip_high": 0.2,
            "fraction": 2e-4,
            "cov_low": 1.0,
            "cov_high": 5.0,
        },
        choose=choose_clipped,
    ),
    kl_coef=0.0,
)
