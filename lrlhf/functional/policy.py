"""Policy-gradient losses per token or per sequence, how they are averaged, and their metrics."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Real
from torch import Tensor

from lrlhf.functional.kl import MAX_LOG_RATIO, kl_estimate
from lrlhf.functional.masking import masked_mean, masked_sum
from lrlhf.functional.names import unknown_name

AGGREGATIONS = ("sequence_mean", "sequence_sum", "token_mean", "constant")


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
    """PPO's clipped surrogate, one ratio per token.

        ρ = exp(logprobs - old)
        ℓ = -min(ρ A, clip(ρ, 1 - low, 1 + high) A),     and where A < 0:  ℓ ≤ -dual_clip · A

    Args:
        logprobs: Under the policy being trained.
        old_logprobs: Under the policy that the ratio starts from; no gradient.
        advantages: No gradient.
        response_mask: Outside it the loss is 0.
        clip_low: ε_low of the clip range [1 - ε_low, 1 + ε_high].
        clip_high: ε_high; above ε_low it is DAPO's clip-higher (decoupled clipping).
        dual_clip: Ratio at which the loss of a bad token stops growing, above 1; None: never.

    Raises:
        ValueError: A bound out of range.

    Reference:
        Schulman et al. 2017, eq. 7, https://arxiv.org/abs/1707.06347; dual clip: Ye et al. 2020,
        eq. 5, https://arxiv.org/abs/1912.09729

    Differs from the paper: the log-ratio is bounded to ±20.
    """
    ratio = token_ratio(logprobs, old_logprobs, response_mask)
    loss = _clipped(ratio, kept_inside(advantages, response_mask), clip_low, clip_high)
    if dual_clip is None:
        return loss
    if dual_clip <= 1:
        raise ValueError(f"dual_clip is {dual_clip}; it must be above 1, or None")
    bound = -dual_clip * kept_inside(advantages, response_mask)
    return torch.where(bound > 0, torch.minimum(loss, bound), loss)


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
    """Clipped surrogate with one ratio per sequence.

        ℓ = -min(ρ A, clip(ρ, 1 - low, 1 + high) A)      with ρ from :func:`sequence_ratio`

    Args:
        logprobs: Under the policy being trained.
        old_logprobs: Under the policy that the ratio starts from; no gradient.
        advantages: One per sequence; no gradient.
        response_mask: Tokens of the ratio. A row without any has ratio 1 and no gradient, so its
            loss is ``-A``.
        clip_low: ε_low of the clip range [1 - ε_low, 1 + ε_high].
        clip_high: ε_high; above ε_low it is DAPO's clip-higher (decoupled clipping).
        length_normalized: Length-normalised ratio, the geometric mean over tokens (GSPO), in
            place of that of the whole sequence (RLOO).

    Raises:
        ValueError: A bound out of range.

    Reference:
        Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, clipped as in TRL; GSPO: Zheng et
        al. 2025, eq. 5-7, https://arxiv.org/abs/2507.18071
    """
    ratio = sequence_ratio(
        logprobs, old_logprobs, response_mask, length_normalized=length_normalized
    )
    return _clipped(ratio, advantages.detach(), clip_low, clip_high)


def sequence_ratio(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    length_normalized: bool = False,
) -> Float[Tensor, " B"]:
    """Probability ratio of whole responses: ``exp(Σ log-ratio)``, or ``exp(mean log-ratio)``.

    Args:
        logprobs: Under the policy being trained.
        old_logprobs: Under the policy that the ratio starts from; no gradient.
        response_mask: Tokens of the ratio; without any it is 1.
        length_normalized: Take the mean over tokens in place of the sum.
    """
    reduce = masked_mean if length_normalized else masked_sum
    return _bounded_exp(reduce(logprobs - old_logprobs.detach(), response_mask, 1))


def importance_weighted_policy_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """Policy gradient with importance weights and no clipping, ``ℓ = -ρ A``.

    On-policy (ρ = 1) its gradient is REINFORCE's ``-A ∇ logprobs``.

    Args:
        logprobs: Under the policy being trained.
        old_logprobs: Under the policy that the ratio starts from; no gradient.
        advantages: No gradient.
        response_mask: Outside it the loss is 0.

    Reference:
        Williams 1992, https://doi.org/10.1007/BF00992696
    """
    ratio = token_ratio(logprobs, old_logprobs, response_mask)
    return -ratio * kept_inside(advantages, response_mask)


def high_entropy_mask(
    entropy: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"], *, fraction: float
) -> Bool[Tensor, "B T"]:
    """Keep of each sequence the tokens at which the policy was least sure.

    Args:
        entropy: Of the next-token distribution at every response token.
        response_mask: Tokens to choose from.
        fraction: Share of a sequence's tokens to keep, in (0, 1]; at least one is kept.

    Raises:
        ValueError: ``fraction`` out of range.

    Reference:
        Wang et al. 2025, §5, https://arxiv.org/abs/2506.01939

    Differs from the paper: the share is taken of each sequence, not of the batch, so that it does
    not depend on how a batch is split.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}; it must lie in (0, 1]")
    count = (response_mask.sum(dim=1) * fraction).floor().clamp(min=1)
    order = torch.where(response_mask, entropy, -torch.inf).argsort(
        dim=1, descending=True, stable=True
    )
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return response_mask & (rank < count[:, None])


def off_policy_sequence_mask(
    logprobs: Float[Tensor, "B T"],
    sampling_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    threshold: float,
) -> Bool[Tensor, "B T"]:
    """Off-policy sequence mask: True keeps a token, False drops it.

        keep = A ≥ 0  or  mean_t (sampling_logprobs - logprobs) ≤ threshold

    A response that the policy would hardly write any more is dropped where it was a bad one: as a
    whole, unless its tokens have advantages of their own.

    Args:
        logprobs: Under the policy being trained.
        sampling_logprobs: Of the engine that sampled the tokens.
        advantages: Of the tokens.
        response_mask: Tokens of the mean.
        threshold: δ, in nats per token.

    Reference:
        DeepSeek-AI 2025 (DeepSeek-V3.2), off-policy sequence masking, §3.1,
        https://arxiv.org/abs/2512.02556
    """
    distance = masked_mean(sampling_logprobs - logprobs.detach(), response_mask, dim=1)
    return (advantages >= 0) | (distance <= threshold)[:, None]


def token_covariance(
    logprobs: Float[Tensor, " N"], advantages: Float[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """Share of each token in the covariance of log-probability and advantage.

        (log π_i - mean of log π) (A_i - mean of A)

    Tokens with a large one make the policy's entropy fall the fastest.

    Args:
        logprobs: Of the tokens of a batch.
        advantages: Of the same tokens.

    Reference:
        Cui et al. 2025, §4, https://arxiv.org/abs/2505.22617
    """
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def aggregate(
    loss: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    mode: str,
    denominator: float | Real[Tensor, ""] | None = None,
) -> Float[Tensor, ""]:
    """Loss aggregation: reduce a loss per token to one number.

        sequence_mean   Σ_sequences (mean over its tokens) / sequences
        sequence_sum    Σ_tokens / sequences
        token_mean      Σ_tokens / tokens
        constant        Σ_tokens / (B · L_max)

    A sequence without a token adds 0 and counts as a sequence.

    Args:
        loss: What stands outside ``response_mask`` is not read.
        response_mask: Tokens that count.
        mode: One of the above.
        denominator: Replaces the divisor (sequences; tokens; B · L_max, where L_max is otherwise
            the width T). Pass that of the whole optimizer step, and the sum over micro-batches and
            ranks does not depend on how it was split. 0 (nothing counts) gives 0.

    Raises:
        ValueError: Unknown mode, or a negative denominator.
    """
    if mode not in AGGREGATIONS:
        raise unknown_name("aggregation mode", mode, AGGREGATIONS)
    if not isinstance(denominator, Tensor) and denominator is not None and denominator < 0:
        raise ValueError(f"denominator is {denominator}; it must be 0 or more")
    if mode == "sequence_mean":
        total = masked_mean(loss, response_mask, dim=1).sum()
    else:
        total = masked_sum(loss, response_mask)
    if denominator is None:
        rows, width = loss.shape
        tokens = response_mask.sum()
        own: dict[str, float | Tensor] = {"token_mean": tokens, "constant": rows * width}
        denominator = own.get(mode, rows)
    divisor = torch.as_tensor(denominator, dtype=total.dtype, device=total.device)
    return total / torch.where(divisor == 0, 1.0, divisor)


class PolicyMetrics(NamedTuple):
    """How far the policy has moved from the one that the ratio starts from; 0 without tokens."""

    approx_kl: Float[Tensor, ""]
    """KL(old || new) in nats, the k3 estimate averaged over tokens."""
    clip_fraction: Float[Tensor, ""]
    """Share of tokens whose ratio is outside the clip range."""
    ratio_max: Float[Tensor, ""]


@torch.no_grad()
def policy_metrics(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyMetrics:
    """Measure an update, token by token.

    Args:
        logprobs: Under the policy being trained.
        old_logprobs: Under the policy that the ratio starts from.
        response_mask: Tokens that count.
        clip_low: ε_low of the clip range [1 - ε_low, 1 + ε_high].
        clip_high: ε_high.
    """
    log_ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0)
    ratio = _bounded_exp(log_ratio)
    outside = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
    return PolicyMetrics(
        approx_kl=masked_mean(kl_estimate(old_logprobs, logprobs, estimator="k3"), response_mask),
        clip_fraction=masked_mean(outside.to(ratio.dtype), response_mask),
        ratio_max=torch.where(response_mask, ratio, 0.0).amax(),
    )


class ClipFractions(NamedTuple):
    """Shares of the ratios that clipping leaves without a gradient."""

    low: Float[Tensor, ""]
    """Below the range at a negative advantage."""
    high: Float[Tensor, ""]
    """Above the range at a positive advantage."""


@torch.no_grad()
def clip_fractions(
    ratio: Float[Tensor, "*dims"],
    advantages: Float[Tensor, "*dims"],
    mask: Bool[Tensor, "*dims"],
    *,
    clip_low: float,
    clip_high: float,
) -> ClipFractions:
    """Count the ratios, of tokens or of sequences, that the clipped loss holds back.

    Args:
        ratio: New over old probability.
        advantages: One per ratio.
        mask: Ratios that count.
        clip_low: ε_low of the clip range [1 - ε_low, 1 + ε_high].
        clip_high: ε_high; above ε_low it is DAPO's clip-higher (decoupled clipping).
    """
    low = (ratio < 1 - clip_low) & (advantages < 0)
    high = (ratio > 1 + clip_high) & (advantages > 0)
    return ClipFractions(
        masked_mean(low.to(ratio.dtype), mask), masked_mean(high.to(ratio.dtype), mask)
    )


def _bounded_exp(log_ratio: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    # see MAX_LOG_RATIO: it is never reached in a sound run, and keeps an unsound one finite
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def token_ratio(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """Importance sampling ratio of each token, ``π / π_old``: 1 outside the response, bounded.

    No gradient flows through the old policy.
    """
    # masked before exp: the gradient of a masked infinity is 0 · inf
    return _bounded_exp(torch.where(response_mask, logprobs - old_logprobs.detach(), 0.0))


def kept_inside(constant: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Return values without gradient, 0 outside the mask."""
    return torch.where(mask, constant.detach(), 0.0)


def _clipped(
    ratio: Float[Tensor, "*dims"],
    advantages: Float[Tensor, "*dims"],
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, "*dims"]:
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low is {clip_low}; it must lie in [0, 1]")
    if clip_high < 0:
        raise ValueError(f"clip_high is {clip_high}; it must be 0 or more")
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, bounded * advantages)
