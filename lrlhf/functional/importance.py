"""Importance sampling between the rollout engine, which sampled the tokens, and the trainer.

The modes are those of the literature: ``token_truncate`` is token-level truncated importance
sampling (TIS), ``token_mask`` IcePop's, ``sequence_mean_mask`` rejects by the geometric mean over a
response.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lrlhf.functional.kl import MAX_LOG_RATIO, kl_estimate
from lrlhf.functional.masking import masked_mean, masked_sum
from lrlhf.functional.names import unknown_name
from lrlhf.functional.policy import sequence_ratio


def _token_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    masked = torch.where(mask, log_ratio, 0.0)
    return masked.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _sequence_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    ratio = sequence_ratio(log_ratio, torch.zeros_like(log_ratio), mask)
    return ratio[:, None].expand_as(log_ratio)


def _sequence_mean_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    nothing = torch.zeros_like(log_ratio)
    ratio = sequence_ratio(log_ratio, nothing, mask, length_normalized=True)
    return ratio[:, None].expand_as(log_ratio)


def _truncate(ratio: Tensor, low: float, high: float) -> Tensor:
    if low > 0:
        raise ValueError(f"low is {low}, but a truncated ratio has no lower bound; leave it at 0")
    return ratio.clamp(max=high)


def _mask(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def _select(ratio: Tensor, low: float, high: float) -> Tensor:
    return ((ratio >= low) & (ratio <= high)).to(ratio.dtype)


class ImportanceMode(NamedTuple):
    """A way to weight tokens, and its default bounds."""

    level: Literal["token", "sequence"]
    """Whether every token has a weight of its own, or all tokens of a response the same."""
    truncates: bool
    """What lies above the upper bound is lowered to it; otherwise it counts as 0."""
    low: float
    high: float
    ratio: Callable[[Tensor, Tensor], Tensor]
    """``(log_ratio, response_mask)`` to the ratio of which the weight is made, `[B, T]`."""
    weigh: Callable[[Tensor, float, float], Tensor]
    """``(ratio, low, high)`` to weights."""


IMPORTANCE_MODES: dict[str, ImportanceMode] = {
    "token_truncate": ImportanceMode("token", True, 0.0, 2.0, _token_ratio, _truncate),
    "token_mask": ImportanceMode("token", False, 0.5, 5.0, _token_ratio, _mask),
    "sequence_truncate": ImportanceMode("sequence", True, 0.0, 2.0, _sequence_ratio, _truncate),
    "sequence_mask": ImportanceMode("sequence", False, 0.0, 3.0, _sequence_ratio, _mask),
    "sequence_mean_mask": ImportanceMode(
        "sequence", False, 0.95, 1.05, _sequence_mean_ratio, _select
    ),
}


@torch.no_grad()
def importance_weights(
    logprobs: Float[Tensor, "B T"],
    sampling_logprobs: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    mode: str,
    low: float,
    high: float,
) -> Float[Tensor, "B T"]:
    """Weight tokens by the ratio of the trainer's probability to that of the sampler.

        ρ_t = exp(logprobs - sampling_logprobs)           ρ = Π_t ρ_t over the response

        token_truncate         min(ρ_t, high)
        token_mask             ρ_t where low ≤ ρ_t ≤ high, else 0
        sequence_truncate      min(ρ, high), for all tokens of the response
        sequence_mask          ρ where low ≤ ρ ≤ high, else 0
        sequence_mean_mask     1 where low ≤ ρ^(1/tokens) ≤ high, else 0

    Args:
        logprobs: The trainer's, of the policy that the update starts from.
        sampling_logprobs: Of the distribution that sampled the tokens, over the same vocabulary.
        response_mask: Tokens of the response; outside it the weight is 1.
        mode: One of the above.
        low: Smallest ratio that still counts, at most 1; 0 where the mode truncates.
        high: Largest ratio that counts as it is, at least 1; ``inf``: no bound.

    Returns:
        The weights, without gradient.

    Raises:
        ValueError: Unknown mode, or bounds that do not hold 1 or do not fit the mode.

    Reference:
        token_truncate, truncated importance sampling: Yao et al. 2025 (TIS), https://openreview.net/forum?id=xsonlP8DRV;
        token_mask: Ling Team 2025 (IcePop), https://arxiv.org/abs/2510.18855; the ratio of the
        geometric mean: Zheng et al. 2025 (GSPO), eq. 7, https://arxiv.org/abs/2507.18071

    Differs from the papers: log-ratios, of tokens or of responses, are bounded to ±20.
    """
    if mode not in IMPORTANCE_MODES:
        raise unknown_name("importance-sampling mode", mode, IMPORTANCE_MODES)
    if not 0 <= low <= 1 <= high:
        raise ValueError(
            f"low is {low} and high is {high}; equal probabilities have the ratio 1, so low must "
            "lie in [0, 1] and high must be 1 or more"
        )
    chosen = IMPORTANCE_MODES[mode]
    weights = chosen.weigh(chosen.ratio(logprobs - sampling_logprobs, response_mask), low, high)
    return torch.where(response_mask, weights, 1.0)


REJECTION_CRITERIA = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)
"""What `rejection_mask` can look at, under verl's names."""

IMPORTANCE_PRESETS: dict[str, tuple[str, dict[str, tuple[float, float]]]] = {
    "decoupled_token_is": ("token_truncate", {}),
    "decoupled_seq_is": ("sequence_truncate", {}),
    "decoupled_token_icepop": ("token_mask", {}),
    "decoupled_seq_is_rs": ("sequence_truncate", {"seq_sum_k1": (0.5, 2.0)}),
    "decoupled_geo_rs": ("none", {"seq_mean_k1": (0.999, 1.001)}),
    "decoupled_geo_rs_seq_tis": ("sequence_truncate", {"seq_mean_k1": (0.999, 1.001)}),
    "decoupled_geo_rs_token_tis": ("token_truncate", {"seq_mean_k1": (0.999, 1.001)}),
    "decoupled_k3_rs": ("none", {"seq_mean_k3": (0.0, 0.01)}),
    "decoupled_k3_rs_seq_tis": ("sequence_truncate", {"seq_mean_k3": (0.0, 0.01)}),
    "decoupled_k3_rs_token_tis": ("token_truncate", {"seq_mean_k3": (0.0, 0.01)}),
}
"""verl's presets by name (``RolloutCorrectionConfig``): the mode, with its own bounds, and what is
rejected. In all of them the old policy is another than the one that sampled."""


def check_rejection(criterion: str, low: float, high: float) -> None:
    """Refuse bounds that would reject equal probabilities.

    Raises:
        ValueError: Unknown criterion, or such bounds.
    """
    if criterion not in REJECTION_CRITERIA:
        raise unknown_name("rejection criterion", criterion, REJECTION_CRITERIA)
    if criterion.endswith("k1") and not 0 <= low <= 1 <= high:
        raise ValueError(
            f"{criterion} is bounded by {low} and {high}; equal probabilities have e^k1 = 1, so "
            "low must lie in [0, 1] and high must be 1 or more"
        )
    if not criterion.endswith("k1") and not low == 0 <= high:
        raise ValueError(
            f"{criterion} is bounded by {low} and {high}; equal probabilities have 0, and nothing "
            "lies below it, so low must be 0 and high 0 or more"
        )


@torch.no_grad()
def rejection_mask(
    logprobs: Float[Tensor, "B T"],
    sampling_logprobs: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    criterion: str,
    low: float,
    high: float,
) -> Bool[Tensor, "B T"]:
    """Reject tokens, or responses as a whole, on which sampler and trainer are too far apart.

        token_k, seq_sum_k, seq_mean_k, seq_max_k      of k1, k2 or k3 per token of KL(μ || π)
        low ≤ e^k1 ≤ high                              k2, k3 ≤ high

    Args:
        logprobs: The trainer's (π), of the policy that the update starts from.
        sampling_logprobs: Of the distribution that sampled the tokens (μ), over the same
            vocabulary.
        response_mask: Tokens of the response.
        criterion: One of `REJECTION_CRITERIA`.
        low: Smallest e^k1 that is accepted; 0 with k2 and k3, which have no lower bound.
        high: Largest e^k1, k2 or k3 that is accepted.

    Returns:
        True where a token is accepted, and outside the response.

    Raises:
        ValueError: Unknown criterion, or bounds that equal probabilities do not satisfy.

    Reference:
        Liu et al. 2025, "When Speed Kills Stability", https://richardli.xyz/rl-collapse, as in verl
        0.9
    """
    check_rejection(criterion, low, high)
    level, estimator = criterion.rsplit("_", 1)
    values = kl_estimate(sampling_logprobs, logprobs, estimator=estimator)
    values = torch.where(response_mask, values, 0.0)
    statistic = {
        "token": lambda: values,
        "seq_sum": lambda: masked_sum(values, response_mask, dim=1)[:, None],
        "seq_mean": lambda: masked_mean(values, response_mask, dim=1)[:, None],
        "seq_max": lambda: values.amax(dim=1, keepdim=True),
    }[level]()
    if estimator == "k1":
        statistic = statistic.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return ((statistic >= low) & (statistic <= high)) | ~response_mask
