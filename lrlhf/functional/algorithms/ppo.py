"""PPO: a critic's generalized advantages under a clipped ratio per token.

    r_t = 1[t last] score - kl_coef · kl_t
    δ_t = r_t + γ V_{t+1} - V_t,      A_t = Σ_{s ≥ t} (γ λ)^{s-t} δ_s,      whitened over the batch
    L   = -mean over tokens of min(ρ_t A_t, clip(ρ_t, 1 - ε, 1 + ε) A_t)

Reference:
    Schulman et al. 2017, eq. 7, https://arxiv.org/abs/1707.06347; advantages: Schulman et al. 2016,
    eq. 16, https://arxiv.org/abs/1506.02438
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lrlhf.functional.advantages import generalized_advantages
from lrlhf.functional.algorithm import (
    Algorithm,
    Estimator,
    EstimatorInputs,
    PolicyLoss,
    counted_scores,
)
from lrlhf.functional.kl import shape_rewards
from lrlhf.functional.policy import clipped_policy_loss


def gae(inputs: EstimatorInputs, *, gamma: float = 1.0, lam: float = 0.95) -> Float[Tensor, "B T"]:
    """Generalized advantages of every token under the critic's values.

    The reward is the score on the last token and a KL penalty on each.

    Args:
        inputs: Scores, KL and values of the rollout.
        gamma: Discount per response token.
        lam: 0 trusts the critic (one-step errors), 1 the outcome (Monte Carlo).

    Raises:
        ValueError: There are no values.

    Reference:
        Schulman et al. 2016, eq. 16, https://arxiv.org/abs/1506.02438
    """
    if inputs.values is None:
        raise ValueError("the estimator gae needs the values of a critic, and there is none")
    scores = counted_scores(inputs)
    rewards = shape_rewards(
        scores, inputs.kl.detach(), inputs.response_mask, kl_coef=inputs.kl_coef
    )
    result = generalized_advantages(
        rewards, inputs.values.detach(), inputs.response_mask, gamma=gamma, lam=lam
    )
    return torch.where(scores.isnan()[:, None], 0.0, result.advantages)


TOKEN_CLIP = PolicyLoss(
    "token_clip",
    clipped_policy_loss,
    aggregate="sequence_mean",
    options={"clip_low": 0.2, "clip_high": 0.2},
)

PPO_CLIP = TOKEN_CLIP._replace(aggregate="token_mean")
"""The same, each token counting alike, as PPO averages it."""

ALGORITHM = Algorithm(
    name="ppo",
    estimator=Estimator(gae, normalize="token", per_token=True, uses_values=True),
    loss=PPO_CLIP,
    kl_in="reward",
)
