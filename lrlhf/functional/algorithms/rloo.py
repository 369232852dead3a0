"""RLOO: REINFORCE leave-one-out.

    R_i = score_i - kl_coef · Σ_t kl_it                     the KL penalty is part of the reward
    A_i = R_i - mean of R over the siblings of i            the same for every token
    ρ_i = exp(Σ_t log π(y_it) - log π_old(y_it))            one ratio per response
    L   = -mean_i min(ρ_i A_i, clip(ρ_i, 1 - ε, 1 + ε) A_i)

Reference:
    Ahmadian et al. 2024, §3.2, https://arxiv.org/abs/2402.14740; the clip is TRL's.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from lrlhf.functional.advantages import leave_one_out_advantages
from lrlhf.functional.algorithm import (
    Algorithm,
    Estimator,
    EstimatorInputs,
    PolicyLoss,
    penalized_scores,
    spread_over_tokens,
)
from lrlhf.functional.policy import sequence_clipped_policy_loss


def rloo(inputs: EstimatorInputs) -> Float[Tensor, "B T"]:
    """Leave-one-out over the penalised score of each response, as in TRL.

        R = score - kl_coef · Σ_t kl_t,      A_t = R - mean R of the siblings, for every token

    Reference:
        Ahmadian et al. 2024, §3.2, https://arxiv.org/abs/2402.14740
    """
    advantages = leave_one_out_advantages(
        penalized_scores(inputs), num_generations=inputs.num_generations
    )
    return spread_over_tokens(advantages, inputs)


SEQUENCE_CLIP = PolicyLoss(
    "sequence_clip",
    sequence_clipped_policy_loss,
    level="sequence",
    aggregate="sequence_mean",
    options={"clip_low": 0.2, "clip_high": 0.2},
)

ALGORITHM = Algorithm(
    name="rloo", estimator=Estimator(rloo, groups=True), loss=SEQUENCE_CLIP, kl_in="reward"
)
