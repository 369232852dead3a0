"""LUSPO: GSPO's loss of each response times its length, so that long responses count in full.

    L = -mean_i |y_i| min(s_i A_i, clip(s_i, 1 - 2e-3, 1 + 2.5e-3) A_i),      s_i as in `gspo`

Reference:
    2026, "Length-Unbiased Sequence Policy Optimization", clip range of §5.1,
    https://arxiv.org/abs/2602.05261; written as in TRL
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from lrlhf.functional.algorithm import Algorithm, PolicyLoss
from lrlhf.functional.algorithms.grpo import GROUP_Z_SCORE
from lrlhf.functional.policy import sequence_clipped_policy_loss


def length_scaled_policy_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    response_mask: Bool[Tensor, "B T"],
    *,
    clip_low: float = 2e-3,
    clip_high: float = 2.5e-3,
) -> Float[Tensor, " B"]:
    """Clipped surrogate of the geometric mean of a response's ratios, times its tokens.

    Arguments are those of `sequence_clipped_policy_loss`.
    """
    losses = sequence_clipped_policy_loss(
        *(logprobs, old_logprobs, advantages, response_mask),
        clip_low=clip_low,
        clip_high=clip_high,
        length_normalized=True,
    )
    return losses * response_mask.sum(dim=1)


ALGORITHM = Algorithm(
    name="luspo",
    estimator=GROUP_Z_SCORE,
    loss=PolicyLoss(
        "luspo",
        length_scaled_policy_loss,
        level="sequence",
        aggregate="sequence_mean",
        options={"clip_low": 2e-3, "clip_high": 2.5e-3},
    ),
    kl_coef=0.0,
)
