"""What an iteration reports of its rollout and of its update."""

from __future__ import annotations

import torch
from torch import Tensor

from lrlhf.functional.kl import kl_estimate
from lrlhf.functional.losses import PolicyLoss
from lrlhf.functional.masking import masked_sum
from lrlhf.functional.policy import policy_metrics, sequence_ratio
from lrlhf.modules.metric_sums import MetricSums
from lrlhf.rewards import RewardResult
from lrlhf.types import Experience


def measure_rollout(
    experience: Experience, result: RewardResult, metrics: MetricSums, *, num_generations: int
) -> None:
    """Scores, lengths, truncation, and groups that teach nothing."""
    scores = experience.scores.double()
    groups = scores.view(-1, num_generations)
    metrics.add_values("rollout/score", scores)
    if num_generations > 1:
        for group in groups:
            scorable = group[group.isfinite()]
            if len(scorable) > 1:
                metrics.add("rollout/score_std", scorable.std(), 1.0)
    spread = groups.nan_to_num(nan=-torch.inf).amax(dim=1) - groups.nan_to_num(nan=torch.inf).amin(
        dim=1
    )
    metrics.add_values("rollout/zero_variance_groups", (spread <= 0).double())
    metrics.add_values("rollout/unscorable_fraction", scores.isnan().double())
    metrics.add_values("rollout/response_length", experience.response_mask.sum(dim=1).double())
    metrics.add_values("rollout/truncated_fraction", experience.truncated.double())
    for column, name in enumerate(result.names):
        values = result.per_function[:, column].double()
        finite = values[values.isfinite()]
        metrics.add_values(f"rewards/{name}/mean", values)
        metrics.add_moments(f"rewards/{name}/std", finite)
    for name, value in result.metrics.items():
        metrics.add(f"rewards/{name}", value, 1.0)
    if experience.kept_mass is not None:
        mask = experience.response_mask
        metrics.add("rollout/kept_mass", masked_sum(experience.kept_mass, mask), mask.sum())


def measure_kl(experience: Experience, metrics: MetricSums) -> None:
    """Distance to the reference per token and per response (k1, nats)."""
    if experience.ref_logprobs is None:
        return
    policy = experience.old_logprobs
    if policy is None:
        policy = experience.sampling_logprobs
    mask = experience.response_mask
    total = masked_sum(kl_estimate(policy, experience.ref_logprobs, estimator="k1"), mask)
    metrics.add("kl/reference", total, mask.sum())
    metrics.add("kl/sequence", total, float(len(experience)))


def measure_mismatch(logprobs: Tensor, experience: Experience, metrics: MetricSums) -> None:
    """Distance between the trainer's log-probabilities of a rollout and the engine's."""
    mask = experience.response_mask
    gap = (logprobs - experience.sampling_logprobs).abs() * mask
    metrics.add("mismatch/mean", masked_sum(gap, mask), mask.sum())
    metrics.maximum("mismatch/max", gap.max())
    kl = kl_estimate(experience.sampling_logprobs, logprobs, estimator="k3")
    metrics.add("mismatch/kl", masked_sum(kl, mask), mask.sum())


def measure_update(
    logprobs: Tensor,
    entropy: Tensor | None,
    micro: Experience,
    metrics: MetricSums,
    *,
    loss: PolicyLoss,
) -> None:
    """How far one micro-batch has moved from the policy that drew it.

    The clip fraction and the largest ratio are of what the loss clips: tokens, or whole responses.
    """
    mask = micro.loss_mask
    tokens = mask.sum()
    old = micro.old_logprobs
    if old is None:
        old = logprobs
        measure_mismatch(logprobs, micro, metrics)
    low, high = (loss.defaults.get(name, 0.2) for name in ("clip_low", "clip_high"))
    measured = policy_metrics(logprobs, old, mask, clip_low=low, clip_high=high)
    metrics.add("policy/approx_kl", measured.approx_kl * tokens, tokens)
    if loss.level == "sequence":
        normalized = loss.defaults.get("length_normalized", False)
        ratio = sequence_ratio(logprobs, old, mask, length_normalized=normalized)[micro.counted]
        clipped = (ratio < 1 - low) | (ratio > 1 + high)
        metrics.add("policy/clip_fraction", clipped.sum(), float(len(ratio)))
        metrics.maximum("policy/ratio_max", ratio.amax() if len(ratio) else 0.0)
    else:
        metrics.add("policy/clip_fraction", measured.clip_fraction * tokens, tokens)
        metrics.maximum("policy/ratio_max", measured.ratio_max)
    # where no entropy was computed, the mean surprise of the sampled tokens estimates it
    surprise = -micro.sampling_logprobs if entropy is None else entropy.detach()
    metrics.add("policy/entropy", masked_sum(surprise, mask), tokens)
    positions = micro.attention_mask.numel()
    metrics.add(
        "perf/padding_fraction", positions - float(micro.attention_mask.sum()), float(positions)
    )
