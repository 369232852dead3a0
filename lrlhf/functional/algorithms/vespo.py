"""VESPO: REINFORCE under a soft weight of the ratio of whole responses, in place of a clip.

    w = Π_t π(y_t) / π_old(y_t),    φ(w) = w^k e^(λ (1 - w)),    φ(1) = 1
    L = -mean over tokens of sg(φ(w_i)) A_i log π(y_it)

Reference:
    2026, "VESPO: Variational Sequence-Level Soft Policy Optimization", §3.4,
    https://arxiv.org/abs/2602.10693; written as in TRL
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lrlhf.functional.algorithm import Algorithm, PolicyLoss
from lrlhf.functional.algorithms.grpo import GROUP_Z_SCORE
from lrlhf.functional.kl import MAX_LOG_RATIO
from lrlhf.functional.masking import masked_sum
from lrlhf.functional.policy import kept_inside


def gamma_weighted_policy_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Float[Tensor, "B T"]:
    """REINFORCE, weighted by a function of the ratio w of the whole response.

        ℓ = -sg(w^k e^(λ (1 - w))) · A · logprobs          with w in [1e-8, e^20]

    Args:
        logprobs: Under the policy being trained.
        old_logprobs: Under the policy that the ratio starts from; no gradient.
        advantages: No gradient.
        response_mask: Tokens of the ratio; outside it the loss is 0.
        k_positive: Exponent k of tokens whose advantage is 0 or more.
        lambda_positive: Decay λ of these tokens.
        k_negative: Exponent of all others.
        lambda_negative: Decay of all others.

    Raises:
        ValueError: An exponent or decay that is negative.

    Differs from TRL: weights of ``importance_sampling`` multiply the loss, not w.
    """
    options = (k_positive, lambda_positive, k_negative, lambda_negative)
    if min(options) < 0:
        raise ValueError(f"the exponents and decays of vespo are {options}; none may be below 0")
    log_ratios = (logprobs - old_logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_ratio = masked_sum(log_ratios, response_mask, dim=1)[:, None]
    log_ratio = log_ratio.clamp(math.log(1e-8), MAX_LOG_RATIO)
    advantages = kept_inside(advantages, response_mask)
    good = advantages >= 0
    k = torch.where(good, k_positive, k_negative)
    decay = torch.where(good, lambda_positive, lambda_negative)
    weight = (k * log_ratio + decay * (1 - log_ratio.exp())).exp()
    return -weight * advantages * torch.where(response_mask, logprobs, 0.0)


ALGORITHM = Algorithm(
    name="vespo",
    estimator=GROUP_Z_SCORE,
    loss=PolicyLoss(
        "vespo",
        gamma_weighted_policy_loss,
        options={
            **{"k_positive": 2.0, "lambda_positive": 3.0},
            **{"k_negative": 3.0, "lambda_negative": 2.0},
        },
    ),
    kl_coef=0.0,
)
