"""Means and sums over the entries that a mask counts. A mask is bool, True means "counts"."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def masked_sum(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, ...]:
    """Sum of the entries that count; what the mask hides may be anything, NaN included.

    Args:
        x: Values.
        mask: Which of them count.
        dim: Axis to sum over; None sums over all.

    Returns:
        The sum, 0 where nothing counts.
    """
    kept = torch.where(mask, x, torch.zeros_like(x))
    return kept.sum() if dim is None else kept.sum(dim=dim)


def masked_mean(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, ...]:
    """Mean of the entries that count.

    Args:
        x: Values.
        mask: Which of them count.
        dim: Axis to average over; None averages over all.

    Returns:
        The mean, 0 where nothing counts.
    """
    count = mask.sum() if dim is None else mask.sum(dim=dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def whiten(
    x: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
) -> Float[Tensor, "*shape"]:
    """Scale the entries that count to variance 1 and, unless told otherwise, mean 0.

        y = (x - mean) / sqrt(var + eps)          (+ mean, if the mean is not to be shifted)

    Args:
        x: Values.
        mask: Which of them count; the variance of them is Bessel-corrected.
        shift_mean: Whether the mean becomes 0; off, it stays what it was.
        eps: Added to the variance.

    Returns:
        The whitened values, 0 outside the mask; fewer than two entries have no variance and are
        only shifted.
    """
    mean = masked_mean(x, mask)
    centered = torch.where(mask, x - mean, torch.zeros_like(x))
    count = mask.sum()
    variance = centered.square().sum() / (count - 1).clamp(min=1)
    scale = torch.where(count > 1, (variance + eps).rsqrt(), torch.ones_like(variance))
    whitened = centered * scale
    return whitened if shift_mean else torch.where(mask, whitened + mean, whitened)
