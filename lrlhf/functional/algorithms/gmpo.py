"""GMPO: GRPO's advantages under the geometric mean of ratios that are bounded token by token.

    s_i = exp(mean_t log π(y_it) - log π_old(y_it)),  each term at most log(1 + high) where A_i > 0,
                                                      and at least log(1 - low) where A_i < 0
    L   = -mean_i s_i A_i

Reference:
    Zhao et al. 2025, eq. 4, clip range (e^-0.4, e^0.4) of §4, https://arxiv.org/abs/2507.20673
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lrlhf.functional.algorithm import Algorithm, PolicyLoss
from lrlhf.functional.algorithms.grpo import GROUP_Z_SCORE
from lrlhf.functional.kl import MAX_LOG_RATIO
from lrlhf.functional.masking import masked_mean

_LOW, _HIGH = 1 - math.exp(-0.4), math.exp(0.4) - 1


def geometric_mean_policy_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    response_mask: Bool[Tensor, "B T"],
    *,
    clip_low: float = _LOW,
    clip_high: float = _HIGH,
) -> Float[Tensor, " B"]:
    """One ratio per sequence, the geometric mean of clipped ratios of its tokens.

        ℓ = -A exp(mean_t log c(ρ_t)),     c(ρ) = min(ρ, 1 + high) where A > 0, else max(ρ, 1 - low)

    A token beyond its bound has no gradient, the others share that of the mean.

    Args:
        logprobs: Under the policy being trained.
        old_logprobs: Under the policy that the ratio starts from; no gradient.
        advantages: One per sequence; no gradient.
        response_mask: Tokens of the mean. A row without any has ratio 1 and no gradient.
        clip_low: How far below 1 the ratio of a token may gain; in the paper 1 - e^-0.4 = 0.33.
        clip_high: How far above 1 the ratio of a token may gain; in the paper e^0.4 - 1 = 0.49.

    Raises:
        ValueError: A bound out of range.

    Reference:
        Zhao et al. 2025 (GMPO), eq. 4, https://arxiv.org/abs/2507.20673

    Differs from the paper: log-ratios are bounded to ±20.
    """
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low is {clip_low}; it must lie in [0, 1]")
    if clip_high < 0:
        raise ValueError(f"clip_high is {clip_high}; it must be 0 or more")
    advantages = advantages.detach()
    # masked before anything else: the gradient of a masked infinity is 0 · inf
    log_ratio = torch.where(response_mask, logprobs - old_logprobs.detach(), 0.0)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    lowest = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    bounded = torch.where(
        advantages[:, None] > 0,
        log_ratio.clamp(max=math.log1p(clip_high)),
        log_ratio.clamp(min=lowest),
    )
    return -advantages * masked_mean(bounded, response_mask, 1).exp()


ALGORITHM = Algorithm(
    name="gmpo",
    estimator=GROUP_Z_SCORE,
    loss=PolicyLoss(
        "gmpo",
        geometric_mean_policy_loss,
        level="sequence",
        aggregate="sequence_mean",
        options={"clip_low": _LOW, "clip_high": _HIGH},
        clips_tokens=True,
    ),
    kl_coef=0.0,
)
