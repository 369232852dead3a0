"""REINFORCE++: rewards to go, whitened over the global batch, under PPO's clipped loss.

    A_t = whiten(Σ_{s ≥ t} γ^{s-t} (1[s last] score - kl_coef · kl_s))
    L   = PPO's clipped loss per token, averaged over all tokens

Reference:
    Hu et al. 2025, §3, https://arxiv.org/abs/2501.03262
"""

from __future__ import annotations

from lrlhf.functional.algorithm import Algorithm, Estimator
from lrlhf.functional.algorithms.ppo import PPO_CLIP
from lrlhf.functional.algorithms.reinforce import reinforce

ALGORITHM = Algorithm(
    name="reinforce_plus_plus",
    estimator=Estimator(reinforce, normalize="token", per_token=True, uses_turn_rewards=True),
    loss=PPO_CLIP,
    kl_in="reward",
)
