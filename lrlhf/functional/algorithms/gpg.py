"""GPG: plain policy gradients on mean-centred scores, made up for the groups that teach nothing.

    A_i = α (R_i - mean of the group) / F,    α = B / (B - M),    F = 1
    L   = -mean over tokens of ρ_it A_i       whose gradient on-policy is -A_i ∇ log π(y_it)

B counts the responses of the batch, M those whose group has equal scores.

Reference:
    Chu et al. 2025, https://arxiv.org/abs/2504.02546; F is the paper's F_norm = 1
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


def gpg(inputs: EstimatorInputs) -> Float[Tensor, "B T"]:
    """Score minus the group's mean, scaled by the share of responses that teach something.

    Reference:
        Chu et al. 2025, https://arxiv.org/abs/2504.02546
    """
    size, scores = inputs.num_generations, penalized_scores(inputs)
    advantages = group_mean_advantages(scores, num_generations=size)
    differs = (advantages.view(-1, size) != 0).any(dim=1, keepdim=True)
    scorable = ~scores.isnan().view(-1, size)
    counts = torch.stack([scorable.sum(), (scorable & differs).sum()]).to(advantages)
    rows, informative = inputs.sum_over_ranks(counts)
    return spread_over_tokens(advantages * rows / informative.clamp(min=1), inputs)


ALGORITHM = Algorithm(
    name="gpg", estimator=Estimator(gpg, groups=True), loss=POLICY_GRADIENT, kl_coef=0.0
)
