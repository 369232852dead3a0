"""REINFORCE++-baseline: the group's mean as baseline, then rewards to go.

    a_i  = score_i - mean of the group
    A_it = Σ_{s ≥ t} γ^{s-t} (1[s last] a_i - kl_coef · kl_is),        whitened over the batch
    L    = PPO's clipped loss per token, averaged over all tokens

Reference:
    Hu et al. 2025, §3, https://arxiv.org/abs/2501.03262
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from lrlhf.functional.advantages import group_mean_advantages
from lrlhf.functional.algorithm import (
    Algorithm,
    Estimator,
    EstimatorInputs,
    counted_scores,
    returns_to_go,
)
from lrlhf.functional.algorithms.ppo import PPO_CLIP


def reinforce_baseline(
    inputs: EstimatorInputs, *, gamma: float = 1.0, discount: str = "token"
) -> Float[Tensor, "B T"]:
    """Group mean as the baseline of the score, then as `reinforce` with all of it at the end.

    Args:
        inputs: Scores and KL of the rollout.
        gamma: Discount per step.
        discount: "token": every token is a step; "turn": a turn is one.

    Reference:
        Hu et al. 2025 (REINFORCE++-baseline), §3, https://arxiv.org/abs/2501.03262
    """
    advantages = group_mean_advantages(
        counted_scores(inputs), num_generations=inputs.num_generations
    )
    # a baseline for whole responses is none for the rewards that later turns have yet to earn
    episode = inputs._replace(turn_rewards=None)
    return returns_to_go(advantages, episode, gamma, discount)


ALGORITHM = Algorithm(
    name="reinforce_baseline",
    estimator=Estimator(reinforce_baseline, normalize="token", per_token=True, groups=True),
    loss=PPO_CLIP,
    kl_in="reward",
)
