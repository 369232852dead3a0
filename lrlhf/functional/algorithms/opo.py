"""OPO: the baseline of least variance under on-policy sampling, a mean weighted by length.

    A_i = R_i - Σ_j l_j R_j / Σ_j l_j        over the group, itself included; l_j is the length
    L   = -mean over tokens of ρ_it A_i      whose gradient on-policy is -A_i ∇ log π(y_it)

Reference:
    Hao et al. 2025, https://arxiv.org/abs/2505.23585
"""

from __future__ import annotations

import torch
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
from lrlhf.functional.algorithms.reinforce import POLICY_GRADIENT


def opo(inputs: EstimatorInputs) -> Float[Tensor, "B T"]:
    """Score minus the mean of the group weighted by length, the same for every token.

    Reference:
        Hao et al. 2025, https://arxiv.org/abs/2505.23585
    """
    size, scores = inputs.num_generations, penalized_scores(inputs)
    # the plain mean goes first: what is left of equal scores is exactly 0
    offsets = group_mean_advantages(scores, num_generations=size).view(-1, size)
    scorable = ~scores.isnan().view(-1, size)
    lengths = inputs.response_mask.sum(dim=1).view(-1, size) * scorable
    baseline = (lengths * offsets).sum(dim=1, keepdim=True)
    baseline = baseline / lengths.sum(dim=1, keepdim=True).clamp(min=1)
    alone = scorable.sum(dim=1, keepdim=True) < 2
    advantages = torch.where(scorable & ~alone, offsets - baseline, 0.0)
    return spread_over_tokens(advantages.flatten(), inputs)


ALGORITHM = Algorithm(
    name="opo", estimator=Estimator(opo, groups=True), loss=POLICY_GRADIENT, kl_coef=0.0
)
