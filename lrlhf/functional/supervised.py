"""Losses of a language model on given texts, one value per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

TokenLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""From log-probabilities ``[B, T]`` and the mask of what counts to losses ``[B, T]``."""


def nll_loss(logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Negative log-likelihood of each token, ``-log p``; 0 outside ``mask``.

    Args:
        logprobs: Of the tokens given what precedes them.
        mask: Tokens that are learnt.
    """
    # where and not a product: 0 · inf is NaN
    return torch.where(mask, -logprobs, 0.0)


def dft_loss(logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Dynamic fine-tuning: ``-sg(p) log p``, without a gradient through the weight p.

    The gradient of the likelihood grows with 1 / p, and so do single improbable tokens; the weight
    takes that away.

    Args:
        logprobs: Of the tokens given what precedes them.
        mask: Tokens that are learnt.

    Reference:
        Wu et al. 2025, eq. 9, https://arxiv.org/abs/2508.05629
    """
    return torch.where(mask, -logprobs.detach().exp() * logprobs, 0.0)


TOKEN_LOSSES: dict[str, TokenLoss] = {"nll": nll_loss, "dft": dft_loss}
