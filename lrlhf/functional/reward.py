"""Losses of reward models: one number per pair, not reduced."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def bradley_terry_loss(
    chosen: Float[Tensor, " B"],
    rejected: Float[Tensor, " B"],
    *,
    margin: float | Float[Tensor, " B"] = 0.0,
    label_smoothing: float = 0.0,
) -> Float[Tensor, " B"]:
    """Negative log-likelihood that the chosen answer wins by the margin.

        (1 - s) · -log σ(c - r - m)  +  s · -log σ(r - c)

    Args:
        chosen: Scores of the better answers.
        rejected: Scores of the worse answers.
        margin: By how much the better one should win; one number, or one per pair.
        label_smoothing: Probability s that a label is the wrong way round.

    Raises:
        ValueError: The margin is not one number per pair, or the smoothing not in [0, 0.5).

    Reference:
        Bradley and Terry 1952; the margin after Touvron et al. 2023 (Llama 2), eq. 2,
        https://arxiv.org/abs/2307.09288
    """
    if isinstance(margin, Tensor) and margin.shape != chosen.shape:
        raise ValueError(
            f"margin has shape {tuple(margin.shape)}, the scores {tuple(chosen.shape)}: "
            "give one margin per pair"
        )
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must lie in [0, 0.5)")
    difference = chosen - rejected
    loss = -F.logsigmoid(difference - margin)
    if label_smoothing == 0:
        return loss
    return (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-difference)


def log_exp_loss(chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """``log(1 + e^(r - c))``, which is the Bradley-Terry loss without margin, for any gap."""
    return torch.logaddexp(torch.zeros_like(chosen), rejected - chosen)


def hps_loss(chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Cross entropy over the two scores, the chosen one being the class.

    Reference:
        Wu et al. 2023 (HPS v2), eq. 2, https://arxiv.org/abs/2306.09341
    """
    logits = torch.stack([chosen, rejected], dim=1)
    target = torch.zeros(len(chosen), dtype=torch.long, device=chosen.device)
    return F.cross_entropy(logits, target, reduction="none")


def tie_loss(score_a: Float[Tensor, " B"], score_b: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Distance between the scores of two answers that people found equal."""
    return (score_a - score_b).abs()


def center_penalty(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """Squared sum of the two scores, which keeps their common level at 0.

    Reference:
        Eisenstein et al. 2023, section 2, https://arxiv.org/abs/2312.09244
    """
    return (chosen + rejected).square()
