"""Losses of a reward model on pairs (Bradley-Terry and others), one value per pair."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def bradley_terry_loss(
    chosen: Float[Tensor, " B"],
    rejected: Float[Tensor, " B"],
    *,
    margin: float | Float[Tensor, ...] = 0.0,
    label_smoothing: float = 0.0,
) -> Float[Tensor, " B"]:
    """Negative log-likelihood that the chosen answer wins, by at least a margin.

        ℓ = -(1 - s) log σ(z) - s log σ(-z)          with z = c - r - m

    Args:
        chosen: Scores c of the better answers.
        rejected: Scores r of the worse answers.
        margin: Gap m by which the chosen should lead, in score units; one for all or one per pair.
        label_smoothing: Probability s that a label is wrong. The loss is smallest where the lead
            c - r is m + log((1 - s) / s).

    Raises:
        ValueError: A margin of another shape, or a smoothing outside [0, 0.5).

    Reference:
        Touvron et al. 2023, eq. 1-2, https://arxiv.org/abs/2307.09288; the smoothing is eq. 3 of
        Mitchell 2023, https://ericmitchell.ai/cdpo.pdf
    """
    if isinstance(margin, Tensor) and margin.ndim > 0 and margin.shape != chosen.shape:
        # a [B, 1] margin would broadcast to [B, B] and train every pair on all the margins
        raise ValueError(
            f"margin has shape {list(margin.shape)}, but there are {chosen.shape[0]} pairs; pass a "
            f"number or a tensor of shape {list(chosen.shape)}"
        )
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must lie in [0, 0.5)")
    lead = chosen - rejected - margin
    loss = -F.logsigmoid(lead)
    if label_smoothing == 0:
        return loss
    return (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-lead)


def log_exp_loss(chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """``log(1 + exp(r - c))``, finite for any finite gap.

    Args:
        chosen: Scores c of the better answers.
        rejected: Scores r of the worse answers.
    """
    gap = rejected - chosen
    return torch.logaddexp(gap, torch.zeros_like(gap))


def hps_loss(chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Cross-entropy over the two scores of a pair as logits, the chosen being the right class.

    Args:
        chosen: Scores of the better answers.
        rejected: Scores of the worse answers.

    Reference:
        Wu et al. 2023 (HPS v2), eq. 1-2, https://arxiv.org/abs/2306.09341
    """
    return -torch.log_softmax(torch.stack([chosen, rejected], dim=-1), dim=-1)[:, 0]


def tie_loss(score_a: Float[Tensor, " B"], score_b: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Distance ``|a - b|`` between answers that were judged equal.

    Args:
        score_a: Scores of one answer.
        score_b: Scores of the other.
    """
    return (score_a - score_b).abs()


def center_penalty(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """``(c + r)²``, which keeps the scores around 0: a pair loss alone leaves their level free.

    Args:
        chosen: Scores c of the better answers.
        rejected: Scores r of the worse answers.

    Reference:
        Eisenstein et al. 2023, eq. 2, https://arxiv.org/abs/2312.09244
    """
    return (chosen + rejected).square()
