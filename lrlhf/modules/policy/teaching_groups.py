"""Which groups of responses an algorithm learns from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from lrlhf.functional.algorithm import Algorithm
from lrlhf.functional.turns import turn_numbers, turn_sums
from lrlhf.modules.policy.experience import (
    as_experience,
    compute_advantages,
    score_columns,
    trained_scores,
)
from lrlhf.modules.settings import Advantage
from lrlhf.rollout import Collected, groups_differ
from lrlhf.types import Rollout

_ROUNDED = 1e-10
"""Of the largest score: what rounding may leave of float64 numbers that are equal."""


@torch.no_grad()
def teaching_groups(
    collected: Collected,
    algorithm: Algorithm,
    settings: Advantage,
    *,
    num_generations: int,
) -> Bool[Tensor, " P"]:
    """Return which groups have responses that the algorithm learns from.

    An estimator that compares scores, or has a baseline that was sampled beside them, is asked
    itself: a group teaches if one of its tokens has an advantage. One that looks at single rewards
    learns from groups in which any of them differs. Others learn something of any response; of
    their groups those teach whose scores differ, or what the turns of their responses have earned,
    where they look at turns. KL penalties and teachers are left out, as they say nothing of the
    prompt.

    Args:
        collected: Responses and their rewards, rows of one prompt consecutive.
        algorithm: That is trained with.
        settings: What is clipped, who is left out, and whether turns have rewards of their own.
        num_generations: Responses per prompt.
    """
    estimator, rollout = algorithm.estimator, collected.rollout
    compares = estimator.groups or bool(algorithm.beside)
    if estimator.uses_values or estimator.uses_rewards or not compares:
        scores = trained_scores(collected, settings, single=estimator.uses_rewards)
        turns = _turns(rollout) if estimator.uses_turn_rewards else None
        if turns is not None and settings.credit != "response":
            left_out = scores.isnan().all(dim=1, keepdim=True)
            scores = torch.cat([scores, turns.to(scores).masked_fill(left_out, torch.nan)], dim=1)
        return groups_differ(scores, num_generations)
    device = rollout.input_ids.device
    experience = as_experience(
        rollout,
        scores=collected.rewards.scores.to(device),
        # what is not known yet, as if there were no difference
        old_logprobs=rollout.sampling_logprobs,
        ref_logprobs=rollout.sampling_logprobs,
    )
    exact: dict[str, Any] = {"scores": experience.scores.double()}
    if rollout.turn_rewards is not None:
        exact["turn_rewards"] = rollout.turn_rewards.double()
    columns: Mapping[str, Tensor] = {
        name: column.to(device).double() for name, column in score_columns(collected).items()
    }
    experience = compute_advantages(
        replace(experience, **exact),
        algorithm=algorithm,
        settings=replace(settings, clip=None),
        reward_kl=None,
        kl_coef=0.0,
        num_generations=num_generations,
        whiten=lambda values, mask, eps: values,
        columns=columns,
    )
    advantages = (experience.advantages * experience.loss_mask).abs().amax(dim=1)
    largest = torch.stack([experience.scores.abs(), *(c.abs() for c in columns.values())])
    least = _ROUNDED * largest.nan_to_num(nan=0.0, posinf=0.0).amax(dim=0)
    return (advantages > least).view(-1, num_generations).any(dim=1)


def _turns(rollout: Rollout) -> Tensor | None:
    """`[B, K]`: what each turn has earned; None: nothing was earned in turns."""
    if rollout.turn_rewards is None:
        return None
    return turn_sums(rollout.turn_rewards, turn_numbers(rollout.response_mask))
