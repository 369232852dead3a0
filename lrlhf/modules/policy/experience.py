"""From scored responses and the models' outputs to what an update trains on."""

from __future__ import annotations

from dataclasses import replace

import torch

from lrlhf.functional.policy import high_entropy_mask
from lrlhf.modules.policy.importance_sampling import with_importance_weights
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.objective import as_experience, compute_advantages
from lrlhf.modules.policy.policy_settings import PolicySettings
from lrlhf.modules.policy.running_moments import ScoreMoments
from lrlhf.modules.policy.sampler import Sample
from lrlhf.modules.policy.scorer import Scored
from lrlhf.types import Experience


@torch.no_grad()
def make_experience(
    sample: Sample,
    scored: Scored,
    moments: ScoreMoments,
    settings: PolicySettings,
    *,
    kl_coef: float,
    exact: bool,
    it: Iteration,
) -> Experience:
    """Compute advantages, importance weights, and which tokens are trained on.

    Args:
        sample: The responses and their scores.
        scored: Log-probabilities and values before the update.
        moments: Of the scores so far, these included.
        settings: Of the run.
        kl_coef: Strength of the KL penalty now.
        exact: Whether the engine's log-probabilities are the policy's own.
        it: The iteration; its ranks whiten together, its metrics are told what was clipped.
    """
    experience = as_experience(
        sample.rollout,
        scores=sample.scores,
        old_logprobs=scored.old_logprobs,
        policy_logprobs=scored.policy_logprobs,
        ref_logprobs=scored.ref_logprobs,
        values=scored.values,
        filler=sample.filler,
    )
    if scored.old_logprobs is not None and not sample.stored:
        experience = with_importance_weights(
            experience,
            scored.old_logprobs,
            settings.importance_sampling,
            exact=exact,
            step=it.step,
        )
    mode = settings.advantage.scale_rewards
    beside = {
        name: moments.scaled(sample.columns[name], mode) for name in settings.algorithm.beside
    }
    if mode != "none":
        it.metrics.add("rollout/running_std", moments.deviation, 1.0)
    experience = compute_advantages(
        experience,
        algorithm=settings.algorithm,
        settings=settings.advantage,
        reward_kl=(settings.reference.kl_estimator or "k1") if settings.kl_in_reward else None,
        kl_coef=kl_coef,
        num_generations=settings.num_generations,
        whiten=it.ranks.whiten,
        scaled_scores=moments.scaled(experience.scores, mode),
        columns=sample.columns | beside,
        metrics=it.metrics,
    )
    fraction = settings.update.high_entropy_fraction
    if fraction == 1:
        return experience
    assert scored.entropy is not None
    chosen = high_entropy_mask(scored.entropy, experience.loss_mask, fraction=fraction)
    return replace(experience, selected=chosen)
