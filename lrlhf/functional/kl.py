"""Reference policy KL: per-token estimates, as a penalty, and its coefficient."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lrlhf.functional.masking import last_tokens
from lrlhf.functional.names import unknown_name

MAX_LOG_RATIO = 20.0
"""Bound on a log-ratio before ``exp``. Real ones stay far below; e^20 is 5e8, and past e^88 a
float32 is infinite, which the product with a zero turns into NaN for the whole batch."""

KL_ESTIMATORS = ("k1", "k2", "k3")


def kl_estimate(
    logprobs: Float[Tensor, "*dims"], ref_logprobs: Float[Tensor, "*dims"], *, estimator: str = "k1"
) -> Float[Tensor, "*dims"]:
    """Estimate KL(policy || reference) from the tokens that were sampled.

        k1 = d        k2 = d² / 2        k3 = e^(-d) - 1 + d        with d = logprobs - ref

    Args:
        logprobs: Log-probabilities under the policy that sampled the tokens, in nats.
        ref_logprobs: Under the reference; no gradient flows into them.
        estimator: k1 is unbiased and may be negative; k2 is biased, with a useful gradient; k3 is
            unbiased and never negative.

    Raises:
        ValueError: Unknown estimator.

    Reference:
        Schulman 2020, http://joschu.net/blog/kl-approx.html

    Differs from the source: in k3 the exponent is bounded to ±20.
    """
    difference = logprobs - ref_logprobs.detach()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return difference.neg().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() - 1 + difference
    raise unknown_name("KL estimator", estimator, KL_ESTIMATORS)


def unbiased_kl_estimate(
    logprobs: Float[Tensor, "*dims"],
    ref_logprobs: Float[Tensor, "*dims"],
    old_logprobs: Float[Tensor, "*dims"],
) -> Float[Tensor, "*dims"]:
    """k3 weighted by the importance ratio: value and gradient are the KL's at any distance.

        π / π_old · (e^(-d) - 1 + d)        with d = logprobs - ref

    As a term of the loss, k3 alone has the gradient of another divergence than KL(policy ||
    reference), and its value is that of the policy that sampled.

    Args:
        logprobs: Log-probabilities under the policy being trained, in nats; with gradient.
        ref_logprobs: Under the reference; no gradient flows into them.
        old_logprobs: Under the policy that sampled the tokens; no gradient.

    Reference:
        DeepSeek-AI 2025 (DeepSeek-V3.2), §3.1, https://arxiv.org/abs/2512.02556

    Differs from the source: both exponents are bounded to ±20.
    """
    log_ratio = (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp() * kl_estimate(logprobs, ref_logprobs, estimator="k3")


def shape_rewards(
    scores: Float[Tensor, " B"],
    kl: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    kl_coef: float,
    turn_rewards: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """Spread the score of a sequence and its KL penalty over the response tokens, as PPO does.

    Estimators with one advantage per response subtract the penalty of the whole response, see
    `lrlhf.functional.algorithm.penalized_scores`.

        r_t = -kl_coef · kl_t + turn_t + (score - Σ_s turn_s) · 1[t is the last response token]

    Args:
        scores: Outcome of each sequence; NaN (unscorable) adds nothing.
        kl: Estimate per token, in nats.
        response_mask: Outside it the reward is 0.
        kl_coef: Score units per nat.
        turn_rewards: The part of each score that was earned at single tokens; what stands outside
            ``response_mask`` is not read, and no gradient flows into it. None: nothing was.

    Reference:
        Ziegler et al. 2019, eq. 2, https://arxiv.org/abs/1909.08593
    """
    rewards = torch.where(response_mask, -kl_coef * kl, 0.0)
    if turn_rewards is not None:
        scored = response_mask & ~scores.isnan()[:, None]
        earned = torch.where(scored, turn_rewards.detach(), 0.0)
        rewards, scores = rewards + earned, scores - earned.sum(dim=1)
    last = last_tokens(response_mask)
    return rewards + torch.where(last, scores.nan_to_num(nan=0.0)[:, None], 0.0)


def adaptive_kl_coef(
    kl_coef: float, current: float, *, target: float, horizon: int, num_samples: int
) -> float:
    """Move the coefficient of the KL penalty so that the KL approaches a target.

        coef · (1 + clip(current / target - 1, ±0.2) · num_samples / horizon)

    Args:
        kl_coef: Coefficient so far.
        current: KL measured now, in nats per sequence.
        target: KL to hold, in the same unit.
        horizon: Samples over which the coefficient may change by about 20 %.
        num_samples: Samples since the last change.

    Raises:
        ValueError: A target or horizon that is not positive, or a KL that is not finite.

    Reference:
        Ziegler et al. 2019, §2.2, https://arxiv.org/abs/1909.08593
    """
    if target <= 0:
        raise ValueError(f"target is {target}; the KL to hold must be above 0")
    if horizon <= 0:
        raise ValueError(f"horizon is {horizon}; it must be above 0 samples")
    if not math.isfinite(current):
        raise ValueError(f"the measured KL is {current}; its coefficient cannot follow it")
    error = min(max(current / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * num_samples / horizon)
