"""DPPO: a trust region of probabilities in place of the ratio's, on GRPO's advantages, no KL term.

    keep_t = not (A_t > 0, π > π_old, D_t > high)  and not (A_t < 0, π < π_old, D_t > low)
    L      = -mean over tokens of keep_t · sg(min(ρ_t, ratio_max)) A_t log π(y_t)

D_t compares the two policies on "this token or any other", which needs no other probability than
the token's: a rare token may multiply its probability many times before it matters, where a clip
of the ratio holds it back at once.

Reference:
    Qi et al. 2026; the bound on the weight: §5.4, https://arxiv.org/abs/2602.04879
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lrlhf.functional.algorithm import Algorithm, LogMetric, PolicyLoss, logs_nothing
from lrlhf.functional.algorithms.grpo import GROUP_Z_SCORE
from lrlhf.functional.names import unknown_name
from lrlhf.functional.policy import kept_inside, token_ratio

DIVERGENCES = ("tv", "kl")


def binary_divergence(
    logprobs: Float[Tensor, "*dims"], old_logprobs: Float[Tensor, "*dims"], *, divergence: str
) -> Float[Tensor, "*dims"]:
    """Divergence between two policies of a token against all others.

        tv   |π - π_old|
        kl   π_old log(π_old / π) + (1 - π_old) log((1 - π_old) / (1 - π))      in nats

    Args:
        logprobs: Of the token under the policy.
        old_logprobs: Of the token under the old policy.
        divergence: One of the above.

    Raises:
        ValueError: Unknown divergence.

    Reference:
        Qi et al. 2026, https://arxiv.org/abs/2602.04879; both logarithms of complements are
        taken of probabilities plus 1e-8, as in verl.
    """
    new, old = logprobs.exp(), old_logprobs.exp()
    if divergence == "tv":
        return (new - old).abs()
    if divergence == "kl":
        others = ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
        return old * (old_logprobs - logprobs) + (1 - old) * others
    raise unknown_name("divergence", divergence, DIVERGENCES)


def divergence_masked_policy_loss(  # noqa: PLR0913  bounds of the region
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    divergence: str = "tv",
    low: float = 0.2,
    high: float = 0.2,
    ratio_max: float = 20.0,
    log_metric: LogMetric = logs_nothing,
) -> Float[Tensor, "B T"]:
    """REINFORCE with a bounded importance weight, without the tokens that leave the trust region.

    Args:
        logprobs: Under the policy being trained.
        old_logprobs: Under the policy that the ratio starts from; no gradient.
        advantages: No gradient.
        response_mask: Outside it the loss is 0.
        divergence: ``tv`` or ``kl``, see `binary_divergence`.
        low: Divergence up to which a token may become less likely where its advantage is negative.
        high: Divergence up to which a token may become likelier where its advantage is positive.
        ratio_max: Largest weight.
        log_metric: Receives the share of tokens outside the trust region, ``masked``.

    Raises:
        ValueError: A bound that is not positive, or an unknown divergence.

    Reference:
        Qi et al. 2026 (DPPO); the bound on the weight: §5.4, https://arxiv.org/abs/2602.04879
    """
    for name, bound in (("low", low), ("high", high), ("ratio_max", ratio_max)):
        if not bound > 0:
            raise ValueError(f"{name} is {bound}; it must be above 0")
    inside = torch.where(response_mask, logprobs, 0.0)
    now, old = inside.detach(), torch.where(response_mask, old_logprobs.detach(), 0.0)
    advantages = kept_inside(advantages, response_mask)
    distance = binary_divergence(now, old, divergence=divergence)
    rises = (advantages > 0) & (now > old) & (distance > high)
    falls = (advantages < 0) & (now < old) & (distance > low)
    log_metric("masked", (rises | falls)[response_mask].float())
    weight = token_ratio(now, old, response_mask).clamp(max=ratio_max)
    return -torch.where(rises | falls, 0.0, weight) * advantages * inside


ALGORITHM = Algorithm(
    name="dppo",
    estimator=GROUP_Z_SCORE,
    loss=PolicyLoss(
        "dppo",
        divergence_masked_policy_loss,
        options={"divergence": "tv", "low": 0.2, "high": 0.2, "ratio_max": 20.0},
    ),
    kl_coef=0.0,
)
