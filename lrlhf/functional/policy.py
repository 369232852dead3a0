"""Policy losses per token or per sequence, and how they become one number."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lrlhf.functional.kl import LOG_RATIO_BOUND, kl_estimate
from lrlhf.functional.masking import masked_mean, masked_sum
from lrlhf.functional.names import unknown_name

_MODES = ("sequence_mean", "token_mean", "constant")


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _pessimistic(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def clipped_policy_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Float[Tensor, "B T"]:
    """PPO's clipped surrogate per token.

        -min(ρA, clip(ρ, 1 - low, 1 + high) A)        ρ = exp(logprobs - old_logprobs)

    Args:
        logprobs: Of the policy that is trained.
        old_logprobs: Of the policy that drew the tokens; no gradient flows into them.
        advantages: No gradient flows into them.
        response_mask: The loss outside it is 0.
        clip_low: How far below 1 the ratio still counts.
        clip_high: How far above 1; larger than ``clip_low`` is DAPO's clip-higher.
        dual_clip: With a negative advantage the loss is at most this many times its size; None:
            no such bound.

    Reference:
        Schulman et al. 2017, eq. 7, https://arxiv.org/abs/1707.06347; dual clip: Ye et al. 2020,
        eq. 3, https://arxiv.org/abs/1912.09729
    """
    advantages = advantages.detach()
    loss = _pessimistic(_ratio(logprobs - old_logprobs.detach()), advantages, clip_low, clip_high)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return torch.where(response_mask, loss, torch.zeros_like(loss))


def sequence_clipped_policy_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    response_mask: Bool[Tensor, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    length_normalized: bool = False,
) -> Float[Tensor, " B"]:
    """The clipped surrogate with one ratio per sequence.

    Args:
        logprobs: Of the policy that is trained.
        old_logprobs: Of the policy that drew the tokens; no gradient flows into them.
        advantages: One per sequence; no gradient flows into them.
        response_mask: The tokens of the sequence.
        clip_low: How far below 1 the ratio still counts.
        clip_high: How far above 1.
        length_normalized: The ratio is exp of the mean log-ratio (GSPO) rather than of its sum
            (RLOO).

    Reference:
        GSPO: Zheng et al. 2025, eq. 5-7, https://arxiv.org/abs/2507.18071
    """
    reduce = masked_mean if length_normalized else masked_sum
    log_ratio = reduce(logprobs - old_logprobs.detach(), response_mask, dim=1)
    return _pessimistic(_ratio(log_ratio), advantages.detach(), clip_low, clip_high)


def cpgd_policy_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    clip_range: float = 0.2,
) -> Float[Tensor, "B T"]:
    """Clipped policy gradient with drift: the log-probability is clipped, not the ratio.

        A > 0: -A · min(logprobs, old + log(1 + range))
        A ≤ 0: -A · max(logprobs, old + log(1 - range))

    Args:
        logprobs: Of the policy that is trained.
        old_logprobs: Of the policy that drew the tokens; no gradient flows into them.
        advantages: No gradient flows into them.
        response_mask: The loss outside it is 0.
        clip_range: How far the ratio may move and still receive a gradient; below 1.

    Reference:
        Liu et al. 2025, eq. 4, https://arxiv.org/abs/2505.12504
    """
    old, advantages = old_logprobs.detach(), advantages.detach()
    clipped = torch.where(
        advantages > 0,
        torch.minimum(logprobs, old + math.log1p(clip_range)),
        torch.maximum(logprobs, old + math.log1p(-clip_range)),
    )
    return torch.where(response_mask, -clipped * advantages, torch.zeros_like(logprobs))


def cispo_policy_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    ratio_max: float = 5.0,
) -> Float[Tensor, "B T"]:
    """Policy gradient with a bounded importance weight: no token loses its gradient.

        -stop_gradient(min(ρ, ratio_max)) · A · logprobs

    Args:
        logprobs: Of the policy that is trained.
        old_logprobs: Of the policy that drew the tokens; no gradient flows into them.
        advantages: No gradient flows into them.
        response_mask: The loss outside it is 0.
        ratio_max: Largest importance weight.

    Reference:
        MiniMax 2025, eq. 4-5, https://arxiv.org/abs/2506.13585
    """
    weight = _ratio((logprobs - old_logprobs).detach()).clamp(max=ratio_max)
    loss = -weight * advantages.detach() * logprobs
    return torch.where(response_mask, loss, torch.zeros_like(loss))


def importance_weighted_policy_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """REINFORCE with the importance ratio and no clipping: ``-ρA``.

    Its gradient on-policy is that of ``-A · logprobs``.

    Args:
        logprobs: Of the policy that is trained.
        old_logprobs: Of the policy that drew the tokens; no gradient flows into them.
        advantages: No gradient flows into them.
        response_mask: The loss outside it is 0.

    Reference:
        Williams 1992, section 4
    """
    loss = -_ratio(logprobs - old_logprobs.detach()) * advantages.detach()
    return torch.where(response_mask, loss, torch.zeros_like(loss))


def aggregate(
    loss: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    mode: str,
    denominator: float | Float[Tensor, ""] | None = None,
) -> Float[Tensor, ""]:
    """Reduce a loss per token to one number.

    Args:
        loss: Per token.
        response_mask: The tokens that count.
        mode: ``sequence_mean``: mean over sequences of the mean over their tokens.
            ``token_mean``: sum over tokens by their number. ``constant``: sum over tokens by
            sequences times the longest possible length.
        denominator: Replaces the number of sequences, the number of tokens, or the constant, so
            that parts of a batch add up to the whole.

    Returns:
        The loss, 0 where nothing counts.

    Raises:
        ValueError: There is no such mode.
    """
    if mode == "sequence_mean":
        total = masked_mean(loss, response_mask, dim=1).sum()
        count: float | Tensor = len(loss)
    elif mode == "token_mean":
        total = masked_sum(loss, response_mask)
        count = response_mask.sum().clamp(min=1)
    elif mode == "constant":
        total = masked_sum(loss, response_mask)
        count = loss.numel()
    else:
        raise unknown_name("aggregation mode", mode, _MODES)
    return total / (count if denominator is None else denominator)


class PolicyMetrics(NamedTuple):
    """How far the policy has moved, over the response tokens."""

    approx_kl: Tensor
    """Mean k3 estimate of KL(old || new), in nats."""
    clip_fraction: Tensor
    """Share of tokens whose ratio lies outside the clip range."""
    ratio_max: Tensor


def policy_metrics(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyMetrics:
    """Measure the move from the old policy.

    Args:
        logprobs: Of the policy that is trained.
        old_logprobs: Of the policy that drew the tokens.
        response_mask: The tokens that count.
        clip_low: How far below 1 the ratio is not clipped.
        clip_high: How far above 1.
    """
    ratio = torch.where(
        response_mask, _ratio(logprobs - old_logprobs), torch.ones_like(logprobs)
    ).detach()
    outside = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
    kl = kl_estimate(old_logprobs, logprobs, estimator="k3")
    return PolicyMetrics(
        approx_kl=masked_mean(kl.detach(), response_mask),
        clip_fraction=masked_mean(outside.to(ratio.dtype), response_mask),
        ratio_max=ratio.max(),
    )
