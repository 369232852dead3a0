"""KL-Cov: GRPO that holds the tokens with the largest covariance to the old policy, no clip.

    c_t = (log π(y_t) - mean) (A_t - mean)        over the tokens of the batch
    L   = -mean over tokens of ρ_t A_t - 1[c_t among the largest] old_kl_coef |log ρ_t|

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
from lrlhf.functional.policy import importance_weighted_policy_loss


def choose_largest(
    covariance: Float[Tensor, " N"],
    generator: torch.Generator,  # noqa: ARG001  nothing is left to chance
    *,
    fraction: float = 2e-4,
) -> Bool[Tensor, " N"]:
    """Choose the ``fraction`` of all tokens with the largest covariance, and one at least.

    Reference:
        Cui et al. 2025, §4.2, https://arxiv.org/abs/2505.22617; the default is verl's
    """
    count = min(max(int(fraction * len(covariance)), 1), len(covariance))
    chosen = torch.zeros(len(covariance), dtype=torch.bool)
    chosen[covariance.topk(count).indices] = True
    return chosen


def kl_cov_policy_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    covariant: Bool[Tensor, "B T"],
    old_kl_coef: float = 1.0,
) -> Float[Tensor, "B T"]:
    """Importance-weighted policy gradient, with a penalty on the chosen tokens.

    Args:
        logprobs: Under the policy being trained.
        old_logprobs: Under the policy that the ratio starts from; no gradient.
        advantages: No gradient.
        response_mask: Outside it the loss is 0.
        covariant: Tokens that `choose_largest` has chosen.
        old_kl_coef: Weight of ``|log ρ|`` there.

    Reference:
        Cui et al. 2025, §4.2, https://arxiv.org/abs/2505.22617
    """
    loss = importance_weighted_policy_loss(logprobs, old_logprobs, advantages, response_mask)
    held = covariant & response_mask
    distance = torch.where(held, logprobs - old_logprobs.detach(), 0.0).abs()
    return loss + old_kl_coef * distance


ALGORITHM = Algorithm(
    name="kl_cov",
    estimator=GROUP_Z_SCORE,
    loss=PolicyLoss(
        "kl_cov",
        kl_cov_policy_loss,
        options={"old_kl_coef": 1.0, "fraction": 2e-4},
        choose=choose_largest,
    ),
    kl_coef=0.0,
)
