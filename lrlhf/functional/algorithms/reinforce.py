"""REINFORCE: the reward to go of every token, no baseline, no clip.

    A_t = Σ_{s ≥ t} γ^{s-t} r_s,       r_s = 1[s last] score - kl_coef · kl_s
    L   = -mean over tokens of ρ_t A_t              whose gradient on-policy is -A_t ∇ log π(y_t)

What turns of the response earned stands at their last tokens instead, and the rest of the score at
the end.

Reference:
    Williams 1992, https://doi.org/10.1007/BF00992696
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from lrlhf.functional.algorithm import (
    Algorithm,
    Estimator,
    EstimatorInputs,
    PolicyLoss,
    counted_scores,
    returns_to_go,
)
from lrlhf.functional.policy import importance_weighted_policy_loss


def reinforce(
    inputs: EstimatorInputs, *, gamma: float = 1.0, discount: str = "token"
) -> Float[Tensor, "B T"]:
    """Reward-to-go of a KL penalty per token, turn rewards, and the rest of the score; no baseline.

    Args:
        inputs: Scores, KL and turn rewards of the rollout.
        gamma: Discount per step.
        discount: "token": every token is a step; "turn": a turn is one.

    Reference:
        Williams 1992, https://doi.org/10.1007/BF00992696
    """
    return returns_to_go(counted_scores(inputs), inputs, gamma, discount)


POLICY_GRADIENT = PolicyLoss("reinforce", importance_weighted_policy_loss)

ALGORITHM = Algorithm(
    name="reinforce",
    estimator=Estimator(reinforce, per_token=True, uses_turn_rewards=True),
    loss=POLICY_GRADIENT,
    kl_in="reward",
)
