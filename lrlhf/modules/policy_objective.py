"""From scores to advantages and from log-probabilities to a loss, for any estimator and loss.

The formulas are in `lrlhf.functional`; here they are put into order, and their denominators are
taken over the whole optimizer step, so that no split into micro-batches or ranks changes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lrlhf.functional.advantages import has_baseline
from lrlhf.functional.estimators import EstimatorInputs
from lrlhf.functional.kl import kl_estimate
from lrlhf.functional.masking import masked_mean
from lrlhf.functional.policy import aggregate
from lrlhf.modules.settings import Advantage, Reference, Update
from lrlhf.types import Experience, Rollout

Whiten = Callable[..., Tensor]
"""Whitens the masked values of all ranks: ``whiten(values, mask, eps=…)``."""


def as_experience(
    rollout: Rollout,
    *,
    scores: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
) -> Experience:
    """Start an experience from a rollout: nothing masked yet, no advantage yet."""
    return Experience(
        **{field.name: getattr(rollout, field.name) for field in fields(rollout)},
        scores=scores.float(),
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        advantages=torch.zeros_like(rollout.sampling_logprobs),
        loss_mask=rollout.response_mask,
        counted=torch.ones_like(rollout.truncated),
    )


def compute_advantages(
    experience: Experience,
    *,
    settings: Advantage,
    kl_in_reward: bool,
    kl_coef: float,
    num_generations: int,
    whiten: Whiten,
) -> Experience:
    """Turn the scores of a rollout into advantages per token.

    The order is TRL's: clip the raw scores, subtract the KL penalty, take the baseline, whiten.

    Args:
        experience: Rows of complete groups, ``old_logprobs`` set where the KL is in the reward;
            ``advantages``, ``loss_mask`` and ``counted`` are not read.
        settings: Estimator, clipping, whitening, and what becomes of truncated responses.
        kl_in_reward: Whether the estimator sees the KL penalty.
        kl_coef: Strength of the penalty.
        num_generations: Responses per prompt.
        whiten: Whitens over all ranks.

    Returns:
        The experience with ``advantages`` (0 outside the response), ``loss_mask`` and ``counted``.
    """
    mask, truncated = experience.response_mask, experience.truncated
    left_out = truncated if settings.truncated != "train" else torch.zeros_like(truncated)
    excluded = left_out if settings.truncated == "exclude" else torch.zeros_like(truncated)
    loss_mask = mask & ~left_out[:, None]
    scores = experience.scores
    if settings.reward_clip_range is not None:
        scores = scores.clamp(*settings.reward_clip_range)
    kl = torch.zeros_like(experience.sampling_logprobs)
    if kl_in_reward and experience.ref_logprobs is not None:
        assert experience.old_logprobs is not None
        kl = kl_estimate(experience.old_logprobs, experience.ref_logprobs, estimator="k1")
    estimator = settings.function
    advantages = estimator.function(
        EstimatorInputs(
            scores=scores,
            kl=kl * loss_mask,
            response_mask=mask,
            num_generations=num_generations,
            kl_coef=kl_coef,
            baseline_mask=~excluded,
        ),
        **settings.options,
    )
    scorable = ~scores.isnan() & ~excluded
    if estimator.groups:
        # a row without a sibling has nothing to be compared with: it is no observation either
        comparable = scores.masked_fill(excluded, torch.nan)
        scorable = has_baseline(comparable, num_generations=num_generations)
    advantages = _normalized(advantages, mask & scorable[:, None], settings, whiten)
    return replace(experience, advantages=advantages, loss_mask=loss_mask, counted=~excluded)


def _normalized(advantages: Tensor, mask: Tensor, settings: Advantage, whiten: Whiten) -> Tensor:
    level = settings.function.normalize
    if settings.normalize is not None:
        level = ("sequence" if level == "none" else level) if settings.normalize else "none"
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


def denominators(experience: Experience) -> Tensor:
    """`[2]`: counted rows and trained tokens of this rank, to be added up over the ranks."""
    return torch.stack([experience.counted.sum(), experience.loss_mask.sum()]).float()


def policy_loss(
    logprobs: Tensor,
    experience: Experience,
    *,
    update: Update,
    reference: Reference,
    kl_coef: float,
    totals: Denominators,
    max_new_tokens: int,
    entropy: Tensor | None = None,
) -> LossTerms:
    """Loss of a micro-batch, as its share of the loss of the whole optimizer step.

    Args:
        logprobs: `[B, T]` of the current policy, with gradient.
        experience: The rows, ``advantages`` and ``loss_mask`` set.
        update: Loss and its options.
        reference: Estimator of the KL term.
        kl_coef: Strength of the KL term of the loss; 0 where the penalty is in the reward.
        totals: Rows and tokens of the whole optimizer step.
        max_new_tokens: Constant length of Dr. GRPO's normalisation.
        entropy: `[B, T]` of the current policy; None: no bonus.
    """
    function = update.function
    mask = experience.loss_mask
    old = experience.old_logprobs if experience.old_logprobs is not None else logprobs.detach()
    advantages = experience.advantages
    if function.level == "sequence":
        advantages = masked_mean(advantages, experience.response_mask, dim=1)
    values = function.function(logprobs, old, advantages, mask, **function.defaults)
    divisor = {
        "token_mean": totals.tokens,
        "sequence_mean": totals.rows,
        "constant": totals.rows * max_new_tokens,
    }[function.aggregate].clamp(min=1)

    def share(term: Tensor) -> Tensor:
        if function.level == "sequence" and term.dim() == 1:
            return term.sum() / divisor
        return aggregate(term, mask, mode=function.aggregate, denominator=divisor)

    policy = share(values)
    zero = policy.detach() * 0
    kl = zero
    if kl_coef > 0 and experience.ref_logprobs is not None:
        kl = share(kl_estimate(logprobs, experience.ref_logprobs, estimator=reference.kl_estimator))
    bonus = zero if entropy is None else share(entropy)
    loss = policy + kl_coef * kl - update.entropy_coef * bonus
    return LossTerms(loss, policy.detach(), kl.detach(), bonus.detach())
