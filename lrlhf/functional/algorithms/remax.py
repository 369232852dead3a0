"""ReMax: REINFORCE whose baseline is the score of the greedy response to the same prompt.

    A_i = R_i - score of the greedy response,      R_i = score_i - kl_coef · Σ_t kl_it
    L   = -mean_i Σ_t ρ_it A_i                      on-policy: -A_i Σ_t ∇ log π(y_it)

Reference:
    Li et al. 2023, algorithm 1, https://arxiv.org/abs/2310.10505

Differs from the paper: several responses per prompt may share one greedy response.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from lrlhf.functional.algorithm import (
    Algorithm,
    Estimator,
    EstimatorInputs,
    penalized_scores,
    spread_over_tokens,
)
from lrlhf.functional.algorithms.reinforce import POLICY_GRADIENT


def remax(inputs: EstimatorInputs) -> Float[Tensor, "B T"]:
    """Score minus the score of the greedy response, the same for every token.

    A row whose own or whose greedy response could not be scored has no advantage.

    Args:
        inputs: Scores and KL of the rollout, and ``rows["greedy"]``.
    """
    advantages = penalized_scores(inputs) - inputs.rows["greedy"]
    return spread_over_tokens(advantages.nan_to_num(0.0), inputs)


ALGORITHM = Algorithm(
    name="remax",
    estimator=Estimator(remax),
    loss=POLICY_GRADIENT._replace(name="remax", aggregate="sequence_sum"),
    kl_in="reward",
    extra_samples={"greedy": {"temperature": 0.0}},
)
