"""Estimates of KL(policy || reference) from samples of the policy, and what is done with them."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lrlhf.functional.names import unknown_name

_ESTIMATORS = ("k1", "k2", "k3")

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ±20 before ``exp``: e^20 is far outside every clip range, and one
outlier token must not turn a whole batch into infinities."""


def kl_estimate(
    logprobs: Float[Tensor, "*shape"],
    ref_logprobs: Float[Tensor, "*shape"],
    *,
    estimator: str = "k1",
) -> Float[Tensor, "*shape"]:
    """Per-token estimate of the KL divergence to the reference, in nats.

        d = logprobs - ref_logprobs
        k1 = d,   k2 = d² / 2,   k3 = e^(-d) - 1 + d

    k1 and k3 have the divergence as their mean under the policy; k2 and k3 are never negative.

    Args:
        logprobs: Of the policy that the tokens were drawn from.
        ref_logprobs: Of the reference; no gradient flows into them.
        estimator: k1, k2 or k3.

    Raises:
        ValueError: There is no such estimator.

    Reference:
        Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html
    """
    difference = logprobs - ref_logprobs.detach()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        bounded = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return torch.expm1(-bounded) + bounded
    raise unknown_name("KL estimator", estimator, _ESTIMATORS)


def shape_rewards(
    scores: Float[Tensor, " B"],
    kl: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    kl_coef: float,
) -> Float[Tensor, "B T"]:
    """Per-token rewards: the KL penalty everywhere, the score on the last response token.

    Args:
        scores: Outcome of each sequence; NaN (unscorable) adds nothing.
        kl: Per-token estimate.
        response_mask: Rewards outside it are 0.
        kl_coef: Strength of the penalty.

    Reference:
        Ziegler et al. 2019, eq. 2, https://arxiv.org/abs/1909.08593
    """
    rewards = torch.where(response_mask, -kl_coef * kl, torch.zeros_like(kl))
    positions = torch.arange(response_mask.shape[1], device=response_mask.device)
    last = torch.where(response_mask, positions, -1).amax(dim=1, keepdim=True)
    is_last = response_mask & (positions == last)
    return rewards + is_last * scores.nan_to_num(nan=0.0)[:, None]


def adaptive_kl_coef(
    kl_coef: float, current: float, *, target: float, horizon: int, num_samples: int
) -> float:
    """Move the KL coefficient towards the value that keeps the KL at its target.

        coef · (1 + clip(current / target - 1, -0.2, 0.2) · num_samples / horizon)

    Args:
        kl_coef: Present coefficient.
        current: KL that was measured, in the units of ``target``.
        target: KL that is wanted.
        horizon: Samples over which the coefficient may change by about a fifth.
        num_samples: Samples since the last change.

    Raises:
        ValueError: ``target`` or ``horizon`` is not positive.

    Reference:
        Ziegler et al. 2019, section 2.2, https://arxiv.org/abs/1909.08593
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"target ({target}) and horizon ({horizon}) must be above 0")
    error = min(max(current / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * num_samples / horizon)
