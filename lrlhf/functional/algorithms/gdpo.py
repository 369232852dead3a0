"""GDPO: every reward is normalised within the group by itself, before the weighted sum.

    z_ik = (r_ik - mean of reward k in the group) / (std of reward k in the group + eps)
    a_i  = Σ_k w_ik z_ik
    A_i  = (a_i - mean over the batch) / (std over the batch + 1e-4)      the same for every token
    L    = GRPO's

GRPO normalises the sum instead, in which a reward of large spread drowns the others and different
rewards may cancel: two responses with the same sum have the same advantage.

Reference:
    Liu et al. 2026, "GDPO: Group reward-Decoupled Normalization Policy Optimization for
    Multi-reward RL Optimization", §3, https://arxiv.org/abs/2601.05242

Differs from the paper: a reward without a value for a response adds nothing to its sum, as in TRL,
and a response that has no score, or no scorable sibling, is left out of the batch's mean and
deviation.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lrlhf.functional.advantages import group_normalized_advantages
from lrlhf.functional.algorithm import (
    Algorithm,
    Estimator,
    EstimatorInputs,
    counted_scores,
    spread_over_tokens,
)
from lrlhf.functional.algorithms.ppo import TOKEN_CLIP


def gdpo(inputs: EstimatorInputs, *, eps: float = 1e-4) -> Float[Tensor, "B T"]:
    """Weighted sum of each reward's z-score within the group, the same for every token.

    Args:
        inputs: ``rows`` with the values of each reward (``reward/<name>``) and its weights
            (``weight/<name>``, NaN where it was not asked). Of the scores it only matters which
            rows have one.
        eps: Added to the standard deviations, in the unit of each reward.

    Raises:
        ValueError: The rewards or their weights are not known.

    Reference:
        Liu et al. 2026, §3, https://arxiv.org/abs/2601.05242
    """
    names = [name.removeprefix("reward/") for name in inputs.rows if name.startswith("reward/")]
    if not names or any(f"weight/{name}" not in inputs.rows for name in names):
        raise ValueError(
            "gdpo normalises each reward by itself, and the rollout does not tell the rewards or "
            "their weights: rollouts that an earlier version has stored cannot be trained on with "
            "it; take grpo, or sample anew"
        )
    left_out = counted_scores(inputs).isnan()
    total = torch.zeros_like(inputs.scores)
    for name in names:
        values = inputs.rows[f"reward/{name}"].masked_fill(left_out, torch.nan)
        z_scores = group_normalized_advantages(
            values, num_generations=inputs.num_generations, eps=eps
        )
        total += inputs.rows[f"weight/{name}"].nan_to_num(nan=0.0) * z_scores
    return spread_over_tokens(total, inputs)


ALGORITHM = Algorithm(
    name="gdpo",
    estimator=Estimator(gdpo, normalize="sequence", groups=True, uses_rewards=True, uses_kl=False),
    loss=TOKEN_CLIP,
)
