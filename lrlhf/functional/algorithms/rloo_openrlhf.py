"""RLOO as OpenRLHF computes it: a clipped leave-one-out score, and a KL penalty per token.

a_i  = clip(score_i - mean of the siblings' scores, ±advantage_clip)   on the last token
A_it = Σ_{s ≥ t} γ^{s-t} (1[s last] a_i - kl_coef · kl_is)
L    = PPO's clipped loss per token, averaged over all tokens
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from lrlhf.functional.advantages import leave_one_out_advantages
from lrlhf.functional.algorithm import (
    Algorithm,
    Estimator,
    EstimatorInputs,
    counted_scores,
    returns_to_go,
)
from lrlhf.functional.algorithms.ppo import PPO_CLIP


def rloo_openrlhf(
    inputs: EstimatorInputs,
    *,
    advantage_clip: float = 10.0,
    gamma: float = 1.0,
    discount: str = "token",
) -> Float[Tensor, "B T"]:
    """Leave-one-out over the raw scores, then a KL penalty per token, as in OpenRLHF.

    The advantage of the score is clipped and put on the last token, ``-kl_coef · kl_t`` is added
    to every token, and the sum from each token on is its advantage.

    Args:
        inputs: Scores and KL of the rollout.
        advantage_clip: Bound on the leave-one-out advantage, in score units.
        gamma: Discount per step.
        discount: "token": every token is a step; "turn": a turn is one.

    Raises:
        ValueError: ``advantage_clip`` is not positive.
    """
    if advantage_clip <= 0:
        raise ValueError(f"advantage_clip is {advantage_clip}; it must be above 0")
    advantages = leave_one_out_advantages(
        counted_scores(inputs), num_generations=inputs.num_generations
    )
    # a baseline for whole responses is none for the rewards that later turns have yet to earn
    episode = inputs._replace(turn_rewards=None)
    clipped = advantages.clamp(-advantage_clip, advantage_clip)
    return returns_to_go(clipped, episode, gamma, discount)


ALGORITHM = Algorithm(
    name="rloo_openrlhf",
    estimator=Estimator(rloo_openrlhf, per_token=True, groups=True),
    loss=PPO_CLIP,
    kl_in="reward",
)
