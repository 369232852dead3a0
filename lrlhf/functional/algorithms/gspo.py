"""GSPO: GRPO's advantages under one ratio per response, its geometric mean over the tokens.

    s_i = exp(mean_t log π(y_it) - log π_old(y_it))
    L   = -mean_i min(s_i A_i, clip(s_i, 1 - 3e-4, 1 + 4e-4) A_i)

The paper's GSPO-token (§4.3, a stop-gradient around s_i) is not here: with one advantage per
response its gradient is the same.

Reference:
    Zheng et al. 2025, eq. 5-7, clip range of §5.1, https://arxiv.org/abs/2507.18071
"""

from __future__ import annotations

from lrlhf.functional.algorithm import Algorithm, PolicyLoss
from lrlhf.functional.algorithms.grpo import GROUP_Z_SCORE
from lrlhf.functional.policy import sequence_clipped_policy_loss

ALGORITHM = Algorithm(
    name="gspo",
    estimator=GROUP_Z_SCORE,
    loss=PolicyLoss(
        "gspo",
        sequence_clipped_policy_loss,
        level="sequence",
        aggregate="sequence_mean",
        options={"clip_low": 3e-4, "clip_high": 4e-4, "length_normalized": True},
    ),
)
