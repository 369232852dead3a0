"""From scores to advantages and from log-probabilities to a loss, for any estimator and loss.

The formulas are in `lrlhf.functional`; here they are put into order, and their denominators are
taken over the whole optimizer step, so that no split into micro-batches or ranks changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lrlhf.functional.advantages import has_baseline
from lrlhf.functional.algorithm import Algorithm, EstimatorInputs, PolicyLoss
from lrlhf.functional.kl import kl_estimate
from lrlhf.functional.masking import masked_mean
from lrlhf.functional.policy import aggregate
from lrlhf.functional.value_loss import clipped_value_loss
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.settings import Advantage, Critic
from lrlhf.rollout import Collected
from lrlhf.types import Experience, Rollout

Whiten = Callable[..., Tensor]
"""Whitens the masked values of all ranks: ``whiten(values, mask, eps=…)``."""


def as_experience(
    rollout: Rollout,
    *,
    scores: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    policy_logprobs: Tensor | None = None,
    values: Tensor | None = None,
    filler: Tensor | None = None,
) -> Experience:
    """Start an experience from a rollout: no advantage yet, nothing masked but ``filler`` rows."""
    everything = torch.ones_like(rollout.truncated)
    return Experience(
        **{field.name: getattr(rollout, field.name) for field in fields(rollout)},
        scores=scores.float(),
        old_logprobs=old_logprobs,
        policy_logprobs=policy_logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        advantages=torch.zeros_like(rollout.sampling_logprobs),
        loss_mask=rollout.response_mask,
        counted=everything if filler is None else everything & ~filler,
    )


def compute_advantages(  # noqa: PLR0913  the order of what happens to a score
    experience: Experience,
    *,
    algorithm: Algorithm,
    settings: Advantage,
    reward_kl: str | None,
    kl_coef: float,
    num_generations: int,
    whiten: Whiten,
    scaled_scores: Tensor | None = None,
    columns: Mapping[str, Tensor] | None = None,
    metrics: MetricSums | None = None,
) -> Experience:
    """Turn the scores of a rollout into advantages per token.

    The order is TRL's: clip the raw scores, subtract the KL penalty, take the baseline, whiten;
    then bound what came of it.

    Args:
        experience: Rows of complete groups, ``old_logprobs`` set where the KL is in the reward,
            ``values`` where there is a critic; rows that are not ``counted`` stay out.
            ``advantages`` and ``loss_mask`` are not read.
        algorithm: Its estimator, and what that wants whitened.
        settings: Clipping, and what becomes of truncated responses.
        reward_kl: Estimator (k1, k2, k3) of the KL penalty in the reward; None: there is none.
        kl_coef: Strength of the penalty.
        num_generations: Responses per prompt.
        whiten: Whitens over all ranks.
        scaled_scores: ``[B]``, used in place of the experience's scores.
        columns: ``[B]`` each, further ones for the estimator; those of ``algorithm.beside`` scaled
            as ``scaled_scores`` are.
        metrics: Told the share of scores and advantages that were clipped.

    Returns:
        The experience with ``advantages`` (0 outside the response), ``loss_mask``, ``counted``,
        and with a critic ``returns``: advantages plus values, before any whitening.
    """
    mask, truncated = experience.response_mask, experience.truncated
    excluded = ~experience.counted
    if settings.truncated == "exclude":
        excluded = excluded | truncated
    # what is sampled beside the responses is measured like their scores, and missed like them
    columns, missing = dict(columns or {}), experience.scores.isnan()
    for name in algorithm.beside:
        columns[name] = _clipped_scores(columns[name], settings.reward_clip_range, None)
        missing = missing | columns[name].isnan()
    if settings.unscorable == "exclude":
        excluded = excluded | missing
    left_out = excluded | truncated if settings.truncated == "trl" else excluded
    loss_mask = mask & ~left_out[:, None]
    scores = experience.scores if scaled_scores is None else scaled_scores
    scores = _clipped_scores(scores, settings.reward_clip_range, metrics)
    scores = scores.masked_fill(missing, torch.nan)
    kl = torch.zeros_like(experience.sampling_logprobs)
    if reward_kl is not None and experience.ref_logprobs is not None:
        policy = experience.policy_logprobs
        policy = experience.old_logprobs if policy is None else policy
        assert policy is not None
        kl = kl_estimate(policy, experience.ref_logprobs, estimator=reward_kl)
    estimator = algorithm.estimator
    advantages = estimator(
        EstimatorInputs(
            scores=scores,
            kl=kl * loss_mask,
            response_mask=mask,
            num_generations=num_generations,
            kl_coef=kl_coef,
            baseline_mask=~excluded,
            values=experience.values,
            rows=columns,
            tokens=_token_columns(experience),
        )
    )
    if advantages.shape != mask.shape:
        raise ValueError(
            f"the estimator of algorithm {algorithm.name!r} returned a tensor of shape "
            f"{tuple(advantages.shape)}, expected one advantage per token, {tuple(mask.shape)}: "
            "lrlhf.functional.spread_over_tokens makes it from one per response"
        )
    returns = None
    if experience.values is not None:
        returns = torch.where(mask, advantages + experience.values, 0.0)
    scorable = ~scores.isnan() & ~excluded
    if estimator.groups:
        # a row without a sibling has nothing to be compared with: it is no observation either
        comparable = scores.masked_fill(excluded, torch.nan)
        scorable = has_baseline(comparable, num_generations=num_generations)
    observed = mask & scorable[:, None]
    advantages = _normalized(advantages, observed, estimator.normalize, whiten)
    return replace(
        experience,
        advantages=_clipped_advantages(advantages, observed, settings.clip, metrics),
        returns=returns,
        loss_mask=loss_mask,
        counted=~excluded,
    )


def trained_scores(collected: Collected, settings: Advantage) -> Tensor:
    """`[B]`: the scores whose differences teach something; NaN where a response is left out."""
    scores = _clipped_scores(collected.rewards.scores, settings.reward_clip_range, None)
    if settings.truncated == "exclude":
        scores = scores.masked_fill(collected.rollout.truncated.to(scores.device), torch.nan)
    return scores


def _clipped_scores(
    scores: Tensor, bounds: tuple[float, float] | None, metrics: MetricSums | None
) -> Tensor:
    if bounds is None:
        return scores
    if metrics is not None:
        outside = (scores < bounds[0]) | (scores > bounds[1])
        metrics.add("rollout/reward_clip_fraction", outside.sum(), scores.isfinite().sum())
    return scores.clamp(*bounds)


def _clipped_advantages(
    advantages: Tensor, observed: Tensor, bound: float | None, metrics: MetricSums | None
) -> Tensor:
    if bound is None:
        return advantages
    if metrics is not None:
        outside = (advantages.abs() > bound) & observed
        metrics.add("rollout/advantage_clip_fraction", outside.sum(), observed.sum())
    return advantages.clamp(-bound, bound)


def value_mask(experience: Experience) -> Tensor:
    """`[B, T]`: the tokens of trained responses with a return: what a critic learns from."""
    known = experience.counted & ~experience.scores.isnan() & experience.loss_mask.any(dim=1)
    return experience.response_mask & known[:, None]


def _token_columns(experience: Experience) -> dict[str, Tensor]:
    columns = {
        "sampling_logprobs": experience.sampling_logprobs,
        "old_logprobs": experience.old_logprobs,
        "ref_logprobs": experience.ref_logprobs,
    }
    return {name: column for name, column in columns.items() if column is not None}


def _normalized(advantages: Tensor, mask: Tensor, level: str, whiten: Whiten) -> Tensor:
    if level == "token":
        return whiten(advantages, mask, eps=1e-8) * mask
    if level == "sequence":
        per_row = masked_mean(advantages, mask, dim=1)
        rows = mask.any(dim=1)
        return advantages + (whiten(per_row, rows, eps=1e-4) - per_row)[:, None] * mask
    return advantages


class LossTerms(NamedTuple):
    """Loss of one micro-batch and what it was made of; sums, to be added up over micro-batches."""

    loss: Tensor
    """Scalar with gradient, already divided by the denominator of the whole optimizer step."""
    policy: Tensor
    kl: Tensor
    entropy: Tensor


class Denominators(NamedTuple):
    """What the sums of one optimizer step are divided by, over all ranks."""

    rows: Tensor
    tokens: Tensor
    selected: Tensor
    """Tokens of the policy loss, which may be restricted to some of ``tokens``."""
    valued: Tensor
    """Tokens of the value loss."""


def denominators(experience: Experience) -> Tensor:
    """`[4]`: the `Denominators` of this rank, to be added up over the ranks."""
    selected = experience.loss_mask if experience.selected is None else experience.selected
    masks = (experience.counted, experience.loss_mask, selected, value_mask(experience))
    return torch.stack([mask.sum() for mask in masks]).float()


def summed_tokens(loss: PolicyLoss, *, tokens: Tensor, rows: Tensor) -> Tensor:
    """Return how many tokens a row of the policy term sums over: 1 where it is a mean.

    A mean per token that is no `LossTerms`, of pretraining texts or of a router, is multiplied by
    it, so that it keeps its proportion too.
    """
    if loss.term_aggregate == "sequence_sum":
        return tokens / rows.clamp(min=1)
    return torch.ones_like(tokens)


def policy_loss(  # noqa: PLR0913  the terms of the objective
    logprobs: Tensor,
    experience: Experience,
    *,
    loss: PolicyLoss,
    entropy_coef: float,
    kl_estimator: str,
    kl_coef: float,
    totals: Denominators,
    max_new_tokens: int,
    entropy: Tensor | None = None,
) -> LossTerms:
    """Loss of a micro-batch, as its share of the loss of the whole optimizer step.

    Args:
        logprobs: `[B, T]` of the current policy, with gradient.
        experience: The rows, ``advantages`` and ``loss_mask`` set; ``importance_weights`` multiply
            each token's gradient in the policy term; no other term, and no denominator.
        loss: With its options in place.
        entropy_coef: Weight of the entropy bonus.
        kl_estimator: k2 or k3.
        kl_coef: Strength of the KL term of the loss; 0 where the penalty is in the reward.
        totals: Rows and tokens of the whole optimizer step.
        max_new_tokens: Constant length of Dr. GRPO's normalisation.
        entropy: `[B, T]` of the current policy; None: no bonus.
    """
    mask = experience.loss_mask
    selected = mask if experience.selected is None else experience.selected
    old = experience.old_logprobs if experience.old_logprobs is not None else logprobs.detach()
    advantages, weights = experience.advantages, experience.importance_weights
    per_response = loss.level == "sequence"
    given = logprobs
    if per_response:
        advantages = masked_mean(advantages, experience.response_mask, dim=1)
        given = _with_weighted_gradient(logprobs, weights)
    values = loss.function(given, old, advantages, selected, **loss.options)
    if weights is not None and not per_response:
        values = values * weights

    def share(term: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        mode = loss.term_aggregate
        divisor = {
            "token_mean": tokens,
            "sequence_mean": totals.rows,
            "sequence_sum": totals.rows,
            "constant": totals.rows * max_new_tokens,
        }[mode].clamp(min=1)
        return aggregate(term, mask, mode=mode, denominator=divisor)

    if per_response:
        policy = values.sum() / totals.rows.clamp(min=1)
    else:
        policy = share(values, selected, totals.selected)
    zero = policy.detach() * 0
    kl = zero
    if kl_coef > 0 and experience.ref_logprobs is not None:
        estimate = kl_estimate(logprobs, experience.ref_logprobs, estimator=kl_estimator)
        kl = share(estimate, mask, totals.tokens)
    bonus = zero if entropy is None else share(entropy, mask, totals.tokens)
    total = policy + kl_coef * kl - entropy_coef * bonus
    return LossTerms(total, policy.detach(), kl.detach(), bonus.detach())


def _with_weighted_gradient(logprobs: Tensor, weights: Tensor | None) -> Tensor:
    """Weigh the gradient of every token and keep the values, of which a response's ratio is made.

    So weights per token fit a loss that has one value per response: its gradient is a sum over
    tokens, of which each takes its own weight.
    """
    if weights is None:
        return logprobs
    now = logprobs.detach()
    return now + weights * (logprobs - now)


def value_loss(
    values: Tensor, experience: Experience, *, critic: Critic, totals: Denominators
) -> Tensor:
    """Loss of the critic on a micro-batch, as its share of the mean over the step's tokens.

    Args:
        values: `[B, T]` of the current critic, with gradient.
        experience: The rows, ``values`` and ``returns`` set.
        critic: Clip range.
        totals: Tokens of the whole optimizer step.
    """
    assert experience.values is not None
    assert experience.returns is not None
    mask = value_mask(experience)
    errors = clipped_value_loss(
        values,
        experience.values,
        experience.returns,
        mask,
        value_clip_range=critic.value_clip_range,
    )
    return aggregate(errors, mask, mode="token_mean", denominator=totals.valued)
