"""RLOO turn by turn: the return of a turn against the same turn of the sibling responses.

    r_ik = what turn k of response i earned - kl_coef · Σ_{t in k} kl_it,   in the last turn plus
           the rest of the score
    G_ik = r_ik + γ G_i(k+1)
    A_ik = G_ik - mean of G_jk over the siblings j that have a turn k       for each token of turn k
    L    = -mean_i Σ_t min(ρ_it A_it, clip(ρ_it, 1 - ε, 1 + ε) A_it)

What a turn earned before does not enter its advantage, and neither does a sibling that had ended by
then. A turn that no sibling has got as far as has no advantage. With one turn in every response the
advantages are those of RLOO, and so is the gradient of an on-policy step.

Reference:
    The baseline: Ahmadian et al. 2024, §3.2, https://arxiv.org/abs/2402.14740; discounted returns
    of turns as advantages, there as z-scores: Ding et al. 2025 (GTPO),
    https://arxiv.org/abs/2511.14846
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lrlhf.functional.advantages import discounted_returns, leave_one_out_advantages
from lrlhf.functional.algorithm import (
    Algorithm,
    Estimator,
    EstimatorInputs,
    counted_scores,
    token_rewards,
)
from lrlhf.functional.algorithms.ppo import TOKEN_CLIP
from lrlhf.functional.turns import spread_over_turns, turn_numbers, turn_sums


def rloo_turn(inputs: EstimatorInputs, *, gamma: float = 1.0) -> Float[Tensor, "B T"]:
    """Leave-one-out over the returns of the turns with the same number.

    Args:
        inputs: Scores, KL and turn rewards of the rollout.
        gamma: Discount per turn.

    Raises:
        ValueError: ``gamma`` outside [0, 1].

    Reference:
        Ahmadian et al. 2024, §3.2, https://arxiv.org/abs/2402.14740
    """
    scores, numbers = counted_scores(inputs), turn_numbers(inputs.response_mask)
    rewards = turn_sums(token_rewards(scores, inputs), numbers)
    counts = ~(rewards.isnan() | scores.isnan()[:, None])
    returns = discounted_returns(rewards, counts, gamma=gamma).masked_fill(~counts, torch.nan)
    advantages = [
        leave_one_out_advantages(turn, num_generations=inputs.num_generations)
        for turn in returns.unbind(dim=1)
    ]
    return spread_over_turns(torch.stack(advantages, dim=1), numbers)


ALGORITHM = Algorithm(
    name="rloo_turn",
    estimator=Estimator(rloo_turn, groups=True, uses_turn_rewards=True, per_turn=True),
    loss=TOKEN_CLIP._replace(aggregate="sequence_sum"),
    kl_in="reward",
)
