"""DAPO: GRPO's advantages, clip-higher (a wider upper clip), token-level loss, no KL penalty.

    L = -Σ_i Σ_t min(ρ_it A_i, clip(ρ_it, 1 - ε_low, 1 + ε_high) A_i) / all tokens

Its two other parts are options of the run: ``dynamic_sampling``, and for responses that are too
long ``advantage.truncated: exclude`` or the reward `OverlongPenalty`.

Reference:
    Yu et al. 2025, §3 and §4.1, https://arxiv.org/abs/2503.14476
"""

from __future__ import annotations

from lrlhf.functional.algorithm import Algorithm, PolicyLoss
from lrlhf.functional.algorithms.grpo import GROUP_Z_SCORE
from lrlhf.functional.policy import clipped_policy_loss

ALGORITHM = Algorithm(
    name="dapo",
    estimator=GROUP_Z_SCORE,
    loss=PolicyLoss(
        "dapo",
        clipped_policy_loss,
        options={"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    ),
    kl_coef=0.0,
)
