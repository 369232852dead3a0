"""Pass@k training: the best of k responses is rewarded, and each takes its share of the credit.

    M_S = max of R over a subset S of k responses of the group
    A_i = (mean of M_S over the S with i - mean of M_S over all S) / (std of M_S over all S + eps)
    L   = GRPO's

Every response of the group is trained on: it is neither best-of-n nor rejection sampling (RAFT).
All subsets are counted in closed form. With k = 1 the advantages are GRPO's, with the biased
standard deviation.

Reference:
    Chen et al. 2025, "Pass@k Training", §2.4, https://arxiv.org/abs/2508.10751

Differs from the paper: scores of any value in place of right and wrong.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from lrlhf.functional.algorithm import (
    Algorithm,
    Estimator,
    EstimatorInputs,
    penalized_scores,
    spread_over_tokens,
)
from lrlhf.functional.algorithms.ppo import TOKEN_CLIP


@lru_cache
def _shares(size: int, k: int) -> tuple[Tensor, Tensor]:
    """Return with what probability the j-th smallest of ``size`` is the largest of k of them.

    Returns:
        `[size]` of any subset, and `[size, size]` of one that holds the i-th smallest.
    """
    overall = torch.tensor([math.comb(j, k - 1) for j in range(size)]).double()
    holding = torch.zeros(size, size, dtype=torch.float64)
    for i in range(size):
        holding[i, i] = math.comb(i, k - 1)
        for j in range(i + 1, size):
            holding[i, j] = math.comb(j - 1, k - 2) if k > 1 else 0
    return overall / math.comb(size, k), holding / math.comb(size - 1, k - 1)


def pass_at_k(inputs: EstimatorInputs, *, k: int = 2, eps: float = 1e-6) -> Float[Tensor, "B T"]:
    """Credit of each response for the best of k, the same for every token.

    Args:
        inputs: Scores of the rollout, and KL where it is to go into the reward.
        k: Size of the subsets. A group with fewer scorable responses has no advantages.
        eps: Added to the standard deviation, in score units.

    Raises:
        ValueError: ``k`` is below 1.

    Reference:
        Chen et al. 2025, §2.4, https://arxiv.org/abs/2508.10751
    """
    if k < 1:
        raise ValueError(f"k is {k}; it must be 1 or more")
    scores = penalized_scores(inputs).view(-1, inputs.num_generations)
    advantages = torch.zeros_like(scores)
    for group, own in zip(scores, advantages, strict=True):
        scorable = (~group.isnan()).nonzero().flatten()
        if len(scorable) < max(k, 2):
            continue
        ordered, order = group[scorable].double().sort(stable=True)
        ordered = ordered - ordered[-1]  # the mean of equal scores is exactly 0
        overall, holding = (shares.to(ordered.device) for shares in _shares(len(scorable), k))
        mean = overall @ ordered
        std = (overall @ (ordered - mean).square()).sqrt()
        own[scorable[order]] = ((holding @ ordered - mean) / (std + eps)).to(own.dtype)
    return spread_over_tokens(advantages.flatten(), inputs)


ALGORITHM = Algorithm(
    name="pass_at_k", estimator=Estimator(pass_at_k, groups=True, options={"k": 2}), loss=TOKEN_CLIP
)
