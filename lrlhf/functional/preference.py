"""Losses of a policy on pairs of answers: of implicit rewards, one value per pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lrlhf.functional.masking import masked_sum
from lrlhf.functional.reward import bradley_terry_loss


def implicit_rewards(
    logprobs: Float[Tensor, "B T"],
    ref_logprobs: Float[Tensor, "B T"] | None,
    response_mask: Bool[Tensor, "B T"],
    *,
    beta: float,
    length_normalized: bool = False,
) -> Float[Tensor, " B"]:
    """Reward of each answer for which the policy would be the optimal one, up to a constant.

        r = β Σ_t m_t (log π(y_t) - log π_ref(y_t))          divided by Σ_t m_t if normalised

    Args:
        logprobs: Of the policy.
        ref_logprobs: Of the reference; None: there is none, and log π_ref is 0.
        response_mask: Tokens of the answers.
        beta: Strength of the pull towards the reference.
        length_normalized: Take the mean over an answer's tokens, not their sum.

    Reference:
        Rafailov et al. 2023, eq. 5, https://arxiv.org/abs/2305.18290; without a reference and
        normalised Meng et al. 2024, eq. 4, https://arxiv.org/abs/2405.14734
    """
    gains = logprobs if ref_logprobs is None else logprobs - ref_logprobs
    rewards = beta * masked_sum(gains, response_mask, dim=1)
    return rewards / response_mask.sum(dim=1).clamp(min=1) if length_normalized else rewards


def ipo_loss(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, beta: float
) -> Float[Tensor, " B"]:
    """Squared distance of the gap of log-ratios from ``1 / (2β)``.

        ℓ = ((c - r) / β - 1 / (2β))²

    Args:
        chosen: Implicit rewards c of the better answers.
        rejected: Implicit rewards r of the worse answers.
        beta: That of the rewards, τ in the paper.

    Reference:
        Azar et al. 2023, eq. 17, https://arxiv.org/abs/2310.12036
    """
    return ((chosen - rejected) / beta - 1 / (2 * beta)).square()


def hinge_loss(chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """``max(0, 1 - (c - r))``: nothing is learnt from a pair whose gap is 1 or more.

    Args:
        chosen: Implicit rewards c of the better answers.
        rejected: Implicit rewards r of the worse answers.

    Reference:
        Zhao et al. 2023, https://arxiv.org/abs/2305.10425
    """
    return torch.relu(1 - (chosen - rejected))


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """A loss of implicit rewards, and how these are made.

    Args:
        name: What configs call it.
        function: From the rewards ``[N]`` of chosen and rejected answers to losses ``[N]``.
        takes_beta: Pass ``beta`` to the function too.
        reference: Whether rewards are relative to a reference.
        length_normalized: Whether they are means over the tokens of an answer.
        beta: Where a run names none.
        margin: By how much the chosen reward should lead, where a run names none.
    """

    name: str
    function: Callable[..., Tensor]
    takes_beta: bool = False
    reference: bool = True
    length_normalized: bool = False
    beta: float = 0.1
    margin: float = 0.0


PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {
    each.name: each
    for each in (
        PreferenceLoss(name="sigmoid", function=bradley_terry_loss),
        PreferenceLoss(
            name="sigmoid_norm", function=bradley_terry_loss, length_normalized=True, beta=2.0
        ),
        PreferenceLoss(name="ipo", function=ipo_loss, takes_beta=True, length_normalized=True),
        PreferenceLoss(name="hinge", function=hinge_loss),
        PreferenceLoss(
            name="simpo",
            function=bradley_terry_loss,
            reference=False,
            length_normalized=True,
            beta=2.0,
            margin=1.0,
        ),
    )
}
