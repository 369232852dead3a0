"""GiGPO: GRPO's advantage of the episode, plus one of each turn among equal observations.

    R_ik  = Σ_{l ≥ k} γ^(l-k) r_il          what turns earned; in the last one the rest of the score
    A^E_i  = z-score of the score in the group
    A^S_ik = z-score of R_ik among the turns of the group before which the same was read
    A_it  = A^E_i + turn_coef · A^S_ik for the tokens of turn k
    L     = GRPO's

What was read before a turn since the last one is its anchor state. A state that a group met once
has no advantage of the turn.

Reference:
    Feng et al. 2025, https://arxiv.org/abs/2505.10978
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lrlhf.functional.advantages import discounted_returns, group_normalized_advantages
from lrlhf.functional.algorithm import (
    Algorithm,
    Estimator,
    EstimatorInputs,
    counted_scores,
    token_rewards,
)
from lrlhf.functional.algorithms.grpo import grpo
from lrlhf.functional.algorithms.ppo import TOKEN_CLIP
from lrlhf.functional.turns import spread_over_turns, turn_numbers, turn_sums


def gigpo(
    inputs: EstimatorInputs, *, turn_coef: float = 1.0, gamma: float = 0.95, eps: float = 1e-4
) -> Float[Tensor, "B T"]:
    """Z-score of the episode, plus that of each turn's return among equal anchor states.

    Args:
        inputs: Scores, turn rewards and observations of the rollout, and KL where it is to go into
            the reward.
        turn_coef: Weight ω of a turn's advantage beside that of the episode.
        gamma: Discount per turn.
        eps: Added to the standard deviations, in score units.

    Raises:
        ValueError: There are no observations, or ``gamma`` lies outside [0, 1].

    Reference:
        Feng et al. 2025, https://arxiv.org/abs/2505.10978
    """
    if inputs.observations is None:
        raise ValueError("the estimator gigpo compares turns by what was read before them: pass it")
    scores, numbers = counted_scores(inputs), turn_numbers(inputs.response_mask)
    rewards = turn_sums(token_rewards(scores, inputs), numbers)
    counts = ~(rewards.isnan() | scores.isnan()[:, None])
    returns = discounted_returns(rewards, counts, gamma=gamma).masked_fill(~counts, torch.nan)
    of_turns = torch.zeros_like(returns)
    shape = (-1, inputs.num_generations, returns.shape[1])
    groups = (each.view(shape) for each in (returns, inputs.observations, of_turns))
    for group, states, own in zip(*groups, strict=True):
        for state in states[states >= 0].unique():
            met = states == state
            own[met] = group_normalized_advantages(
                group[met], num_generations=int(met.sum()), eps=eps
            )
    return grpo(inputs, eps=eps) + turn_coef * spread_over_turns(of_turns, numbers)


ALGORITHM = Algorithm(
    name="gigpo",
    estimator=Estimator(
        gigpo, groups=True, uses_turn_rewards=True, per_turn=True, uses_observations=True
    ),
    loss=TOKEN_CLIP,
)
