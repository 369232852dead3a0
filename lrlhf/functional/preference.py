"""Losses of a policy on answers: of implicit rewards, one value per pair or per answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from lrlhf.functional.kl import MAX_LOG_RATIO
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
        length_normalized: Take the mean over an answer's tokens, not their sum (SimPO).

    Reference:
        Rafailov et al. 2023, eq. 5, https://arxiv.org/abs/2305.18290; without a reference and
        normalised Meng et al. 2024, eq. 4, https://arxiv.org/abs/2405.14734
    """
    gains = logprobs if ref_logprobs is None else logprobs - ref_logprobs
    rewards = beta * masked_sum(gains, response_mask, dim=1)
    return rewards / response_mask.sum(dim=1).clamp(min=1) if length_normalized else rewards


def length_desensitized(
    logprobs: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"], *, alpha: float
) -> Float[Tensor, "B T"]:
    """Weigh down what the longer answer of a pair has beyond the length of the shorter one.

    Args:
        logprobs: Of all first answers, then of all second ones.
        response_mask: Tokens of the answers.
        alpha: Weight of the tokens beyond, in [0, 1]; 1 changes nothing.

    Reference:
        Liu et al. 2024 (LD-DPO), eq. 9, https://arxiv.org/abs/2409.06411
    """
    shared = response_mask.sum(dim=1).view(2, -1).amin(dim=0).repeat(2)
    beyond = response_mask.cumsum(dim=1) > shared[:, None]
    return torch.where(beyond, alpha * logprobs, logprobs)


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


def exo_loss(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, epsilon: float = 1e-3
) -> Float[Tensor, " B"]:
    """EXO: reverse KL between the pair's probabilities and labels that are wrong with ε.

        q = σ(c - r),    ℓ = q log(q / (1 - ε)) + (1 - q) log((1 - q) / ε)

    Reference:
        Ji et al. 2024, eq. 16, https://arxiv.org/abs/2402.00856
    """
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon is {epsilon}; it must lie between 0 and 1")
    gap = chosen - rejected
    right, wrong = logsigmoid(gap), logsigmoid(-gap)
    return right.exp() * (right - math.log1p(-epsilon)) + wrong.exp() * (wrong - math.log(epsilon))


def nca_loss(chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """NCA: ``-log σ(c) - ½ log σ(-c) - ½ log σ(-r)``, which holds the chosen answer's likelihood.

    Reference:
        Chen et al. 2024, https://arxiv.org/abs/2402.05369
    """
    return -logsigmoid(chosen) - logsigmoid(-chosen) / 2 - logsigmoid(-rejected) / 2


def robust_loss(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, epsilon: float = 0.1
) -> Float[Tensor, " B"]:
    """rDPO: DPO's loss, unbiased where a share ε of the labels is wrong.

        ℓ = (-(1 - ε) log σ(c - r) + ε log σ(r - c)) / (1 - 2ε)

    Reference:
        Chowdhury et al. 2024, eq. 12, https://arxiv.org/abs/2403.00409
    """
    if not 0 <= epsilon < 0.5:
        raise ValueError(f"epsilon is {epsilon}; it must be 0 or more and below 0.5")
    gap = chosen - rejected
    kept, flipped = (1 - epsilon) * logsigmoid(gap), epsilon * logsigmoid(-gap)
    return (flipped - kept) / (1 - 2 * epsilon)


def bco_pair_loss(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """BCO on pairs, without its running shift of the rewards: ``-log σ(c) - log σ(-r)``.

    Reference:
        Jung et al. 2024, https://arxiv.org/abs/2404.04656; without the shift as in TRL
    """
    return -logsigmoid(chosen) - logsigmoid(-rejected)


def sppo_loss(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, beta: float
) -> Float[Tensor, " B"]:
    """SPPO with the winner's probability 1: ``(c / β - 1 / (2β))² + (r / β + 1 / (2β))²``.

    Reference:
        Wu et al. 2024, eq. 4.7, https://arxiv.org/abs/2405.00675
    """
    aim = 1 / (2 * beta)
    return (chosen / beta - aim).square() + (rejected / beta + aim).square()


def apo_zero_loss(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """APO-zero: ``1 - σ(c) + σ(r)``, for chosen answers that are better than the policy's.

    Reference:
        D'Oosterlinck et al. 2024, eq. 7, https://arxiv.org/abs/2408.06266
    """
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def apo_down_loss(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """APO-down: ``σ(c) + 1 - σ(c - r)``, for chosen answers that are worse than the policy's.

    Reference:
        D'Oosterlinck et al. 2024, eq. 8, https://arxiv.org/abs/2408.06266
    """
    return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


def discopop_loss(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, tau: float = 0.05
) -> Float[Tensor, " B"]:
    """DiscoPOP: a blend of the logistic and the exponential loss by the gap d = c - r.

        ℓ = (1 - σ(d / τ)) · -log σ(d) + σ(d / τ) e^(-d)

    Reference:
        Lu et al. 2024, eq. 5, https://arxiv.org/abs/2406.08414
    """
    if not tau > 0:
        raise ValueError(f"tau is {tau}; it must be above 0")
    gap = chosen - rejected
    blend = torch.sigmoid(gap / tau)
    # where the exponential is infinite its share is 0, and their product would be NaN
    return -(1 - blend) * logsigmoid(gap) + blend * (-gap).clamp(max=MAX_LOG_RATIO).exp()


def kto_loss(
    rewards: Float[Tensor, " B"],
    labels: Bool[Tensor, " B"],
    reference_point: Float[Tensor, " B"],
    *,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Tensor, " B"]:
    """KTO: how far each answer is from the reference point, on the side where it belongs.

        ℓ = λ_D (1 - σ(r - β z0)) of a desirable answer,    λ_U (1 - σ(β z0 - r)) of another

    With z0 = 0 it is the unpaired form of APO-zero.

    Args:
        rewards: Implicit rewards r.
        labels: True: desirable.
        reference_point: β z0, the KL divergence from the reference times β; gets no gradient.
        desirable_weight: λ_D.
        undesirable_weight: λ_U.

    Reference:
        Ethayarajh et al. 2024, eq. 8, https://arxiv.org/abs/2402.01306; D'Oosterlinck et al. 2024,
        eq. 7, https://arxiv.org/abs/2408.06266, its two terms apart
    """
    above = rewards - reference_point.detach()
    desirable = desirable_weight * torch.sigmoid(-above)
    return torch.where(labels, desirable, undesirable_weight * torch.sigmoid(above))


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
        of_gap: Whether it is a function of the gap c - r alone, from which a margin can be taken
            off; with others margins do not count.
    """

    name: str
    function: Callable[..., Tensor]
    takes_beta: bool = False
    reference: bool = True
    length_normalized: bool = False
    beta: float = 0.1
    margin: float = 0.0
    of_gap: bool = True


PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {
    each.name: each
    for each in (
        PreferenceLoss(name="sigmoid", function=bradley_terry_loss),
        PreferenceLoss(
            name="sigmoid_norm", function=bradley_terry_loss, length_normalized=True, beta=2.0
        ),
        PreferenceLoss(name="ipo", function=ipo_loss, takes_beta=True, length_normalized=True),
        PreferenceLoss(name="hinge", function=hinge_loss),
        PreferenceLoss(name="robust", function=robust_loss),
        PreferenceLoss(name="exo_pair", function=exo_loss),
        PreferenceLoss(name="nca_pair", function=nca_loss, of_gap=False),
        PreferenceLoss(name="bco_pair", function=bco_pair_loss, of_gap=False),
        PreferenceLoss(name="sppo_hard", function=sppo_loss, takes_beta=True, of_gap=False),
        PreferenceLoss(name="apo_zero", function=apo_zero_loss, of_gap=False),
        PreferenceLoss(name="apo_down", function=apo_down_loss, of_gap=False),
        PreferenceLoss(name="discopop", function=discopop_loss),
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
