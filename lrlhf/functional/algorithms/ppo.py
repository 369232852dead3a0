"""PPO: a critic's generalized advantages under a clipped ratio per token.

    r_t = 1[t last] score - kl_coef · kl_t          what turns earned: at the last token of each
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
    token_rewards,
)
from lrlhf.functional.masking import last_tokens, masked_sum
from lrlhf.functional.policy import clipped_policy_loss
from lrlhf.functional.turns import step_ends


def gae(
    inputs: EstimatorInputs,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    length_alpha: float | None = None,
    value_lam: float | None = None,
    discount: str = "token",
) -> Float[Tensor, "B T"]:
    """Generalized advantages of every token under the critic's values.

    The reward is a KL penalty on each token, what a turn earned on its last token, and the rest of
    the score on the last token of all. The return of a row in ``inputs.bootstrap_mask`` goes on
    with the critic's value, by approximation that of the state before the last token: the state
    behind it is in no rollout.

    Args:
        inputs: Scores, KL, values and turn rewards of the rollout.
        gamma: Discount per step.
        lam: 0 trusts the critic (one-step errors), 1 the outcome (Monte Carlo).
        length_alpha: α of a lam that depends on the length l of each response, in place of ``lam``:
            ``max(0, 1 - 1 / (α l))``; None: ``lam`` for all.
        value_lam: lam of the critic's targets (decoupled GAE), see `Estimator.of_values`; None: the
            same as of the advantages.
        discount: "token": every token is a step; "turn": a turn is one, and inside it gamma and lam
            are 1.

    Raises:
        ValueError: There are no values, or ``gamma``, ``lam``, ``length_alpha`` or ``discount`` is
            out of range.

    Reference:
        Schulman et al. 2016, eq. 16, https://arxiv.org/abs/1506.02438; rows that were cut off:
        Pardo et al. 2018, §4, https://arxiv.org/abs/1712.00378; length-adaptive lam: Yue et al.
        2025 (VAPO), §4.2, https://arxiv.org/abs/2504.05118
    """
    del value_lam  # what `Estimator.of_values` reads
    if inputs.values is None:
        raise ValueError("the estimator gae needs the values of a critic, and there is none")
    scores, values, mask = counted_scores(inputs), inputs.values.detach(), inputs.response_mask
    final_values = None
    if inputs.bootstrap_mask is not None:
        final_values = masked_sum(values, last_tokens(mask), dim=1) * inputs.bootstrap_mask
    lams: float | Tensor = lam
    if length_alpha is not None:
        if not length_alpha > 0:
            raise ValueError(f"length_alpha is {length_alpha}; it must be above 0, or None")
        lengths = mask.sum(dim=1).clamp(min=1).to(values.dtype)
        lams = (1 - 1 / (length_alpha * lengths)).clamp(min=0)
    result = generalized_advantages(
        token_rewards(scores, inputs),
        values,
        mask,
        gamma=gamma,
        lam=lams,
        step_ends=step_ends(mask, discount),
        final_values=final_values,
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
    estimator=Estimator(
        gae, normalize="token", per_token=True, uses_values=True, uses_turn_rewards=True
    ),
    loss=PPO_CLIP,
    kl_in="reward",
)
