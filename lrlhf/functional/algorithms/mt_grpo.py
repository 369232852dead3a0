"""MT-GRPO: GRPO with an advantage for the outcome and one for each turn before the last.

    r_ik  = what turn k of response i earned, O_i = score_i - Σ r_ik,   k before the last turn of i
    A^O_i  = z-score of O_i in the group
    A^T_ik = z-score of r_ik among the siblings with a turn k before their last
    A_it  = A^O_i + turn_coef · A^T_ik for the tokens of such a turn k, A^O_i in the last turn
    L     = GRPO's

The reward of the last turn is part of the outcome. With one turn in every response, or without
rewards of turns, the advantages are those of GRPO.

Reference:
    Zeng et al. 2025, "Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Credit
    Assignment", §4, https://arxiv.org/abs/2505.11821

Differs from the paper: any number of turns in place of two, and the coefficient stands before the
advantage of the turn, as in the authors' code.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lrlhf.functional.advantages import group_normalized_advantages
from lrlhf.functional.algorithm import (
    Algorithm,
    Estimator,
    EstimatorInputs,
    penalized_scores,
    spread_over_tokens,
)
from lrlhf.functional.algorithms.grpo import grpo
from lrlhf.functional.algorithms.ppo import TOKEN_CLIP
from lrlhf.functional.turns import spread_over_turns, turn_numbers, turn_sums


def mt_grpo(
    inputs: EstimatorInputs, *, turn_coef: float = 1.0, eps: float = 1e-4
) -> Float[Tensor, "B T"]:
    """Z-score of the outcome, plus that of each turn before the last on its tokens.

    Args:
        inputs: Scores and turn rewards of the rollout, and KL where it is to go into the reward.
        turn_coef: Weight of a turn's advantage beside that of the outcome.
        eps: Added to the standard deviations, in score units.

    Reference:
        Zeng et al. 2025, §4, https://arxiv.org/abs/2505.11821
    """
    if inputs.turn_rewards is None:
        return grpo(inputs, eps=eps)
    scores, numbers = penalized_scores(inputs), turn_numbers(inputs.response_mask)
    earned = turn_sums(inputs.turn_rewards.detach(), numbers)
    turns = torch.arange(earned.shape[1], device=earned.device)
    early = (turns < numbers.amax(dim=1, keepdim=True)) & ~scores.isnan()[:, None]
    earned = torch.where(early, earned, torch.nan)

    def z_scores(column: Tensor) -> Tensor:
        size = inputs.num_generations
        return group_normalized_advantages(column, num_generations=size, eps=eps)

    of_outcome = z_scores(scores - earned.nansum(dim=1))
    of_turns = torch.stack([z_scores(turn) for turn in earned.unbind(dim=1)], dim=1)
    return spread_over_tokens(of_outcome, inputs) + turn_coef * spread_over_turns(of_turns, numbers)


ALGORITHM = Algorithm(
    name="mt_grpo",
    estimator=Estimator(mt_grpo, groups=True, uses_turn_rewards=True, per_turn=True),
    loss=TOKEN_CLIP,
)
