"""Dr. GRPO: GRPO without what biases it towards length and easy prompts.

    A_i = R_i - mean of the group                                   the same for every token
    L   = -Σ_i Σ_t min(ρ_it A_i, clip(ρ_it, 1 - ε, 1 + ε) A_i) / (rows · max_new_tokens)

Reference:
    Liu et al. 2025, §3.1, https://arxiv.org/abs/2503.20783
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from lrlhf.functional.advantages import group_mean_advantages
from lrlhf.functional.algorithm import (
    Algorithm,
    Estimator,
    EstimatorInputs,
    penalized_scores,
    spread_over_tokens,
)
from lrlhf.functional.algorithms.ppo import TOKEN_CLIP


def dr_grpo(inputs: EstimatorInputs) -> Float[Tensor, "B T"]:
    """Score minus the group's mean, the same for every token.

    Reference:
        Liu et al. 2025, §3.1, https://arxiv.org/abs/2503.20783
    """
    advantages = group_mean_advantages(
        penalized_scores(inputs), num_generations=inputs.num_generations
    )
    return spread_over_tokens(advantages, inputs)


ALGORITHM = Algorithm(
    name="dr_grpo",
    estimator=Estimator(dr_grpo, groups=True),
    loss=TOKEN_CLIP._replace(name="dr_grpo", aggregate="constant"),
)
