"""GRPO: the z-score of a response within its group, PPO's loss per token.

    A_i = (R_i - mean of the group) / (std of the group + eps)      the same for every token
    L   = -mean_i mean_t [min(ρ_it A_i, clip(ρ_it, 1 - ε, 1 + ε) A_i) - kl_coef · k3_it]

Reference:
    Shao et al. 2024, §4.1.2, https://arxiv.org/abs/2402.03300
"""

from __future__ import annotations

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
from lrlhf.functional.algorithms.ppo import TOKEN_CLIP


def grpo(inputs: EstimatorInputs, *, eps: float = 1e-4) -> Float[Tensor, "B T"]:
    """Z-score within the group, the same for every token.

    Args:
        inputs: Scores of the rollout, and KL where it is to go into the reward.
        eps: Added to the standard deviation, in score units.

    Reference:
        Shao et al. 2024, §4.1.2, https://arxiv.org/abs/2402.03300
    """
    advantages = group_normalized_advantages(
        penalized_scores(inputs), num_generations=inputs.num_generations, eps=eps
    )
    return spread_over_tokens(advantages, inputs)


GROUP_Z_SCORE = Estimator(grpo, groups=True)

ALGORITHM = Algorithm(name="grpo", estimator=GROUP_Z_SCORE, loss=TOKEN_CLIP)
