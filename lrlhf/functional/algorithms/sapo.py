"""SAPO: GRPO's advantages under a soft gate of the ratio in place of a clip, no KL penalty.

    f(ρ) = (4 / τ) σ(τ (ρ - 1)),       τ = tau_positive where A > 0, else tau_negative
    L    = -mean_i mean_t f(ρ_it) A_i

The gradient of a token shrinks with its distance from ρ = 1, where it is that of ρ itself, and
nowhere becomes 0 at once.

Reference:
    Gao et al. 2025, https://arxiv.org/abs/2511.20347
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lrlhf.functional.algorithm import Algorithm, PolicyLoss
from lrlhf.functional.algorithms.grpo import GROUP_Z_SCORE
from lrlhf.functional.policy import kept_inside, token_ratio


def soft_gate_policy_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Float[Tensor, "B T"]:
    """Soft gate of the ratio per token.

        ℓ = -(4 / τ) σ(τ (ρ - 1)) A

    Args:
        logprobs: Under the policy being trained.
        old_logprobs: Under the policy that the ratio starts from; no gradient.
        advantages: No gradient.
        response_mask: Outside it the loss is 0.
        tau_positive: Temperature τ of tokens with a positive advantage; larger is stricter.
        tau_negative: Temperature τ of all other tokens.

    Raises:
        ValueError: A temperature that is not positive.

    Reference:
        Gao et al. 2025 (SAPO), https://arxiv.org/abs/2511.20347
    """
    for name, tau in (("tau_positive", tau_positive), ("tau_negative", tau_negative)):
        if not tau > 0:
            raise ValueError(f"{name} is {tau}; it must be above 0")
    advantages = kept_inside(advantages, response_mask)
    taus = torch.where(advantages > 0, tau_positive, tau_negative)
    ratio = token_ratio(logprobs, old_logprobs, response_mask)
    gate = 4 / taus * torch.sigmoid(taus * (ratio - 1))
    return -gate * advantages


ALGORITHM = Algorithm(
    name="sapo",
    estimator=GROUP_Z_SCORE,
    loss=PolicyLoss(
        "sapo",
        soft_gate_policy_loss,
        aggregate="sequence_mean",
        options={"tau_positive": 1.0, "tau_negative": 1.05},
    ),
    kl_coef=0.0,
)
