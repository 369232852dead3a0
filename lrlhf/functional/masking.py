"""Sums, means and whitening over the entries that a mask lets count."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def last_tokens(mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Return the last entry of each row that counts; none in a row where nothing does."""
    left = mask.flip(1).cumsum(1).flip(1)  # entries from here to the end
    return mask & (left == 1)


def masked_sum(
    x: Float[Tensor, "*dims"], mask: Bool[Tensor, "*dims"], dim: int | None = None
) -> Float[Tensor, ...]:
    """Sum of the entries inside ``mask``, over one dimension or over all.

    What stands outside, NaN and infinity included, reaches neither the value nor the gradient.

    Args:
        x: Any shape.
        mask: Same shape; True counts.
        dim: Dimension to sum over; None: all of them.
    """
    # where and not a product: 0 · NaN is NaN
    masked = torch.where(mask, x, 0.0)
    return masked.sum() if dim is None else masked.sum(dim)


def masked_mean(
    x: Float[Tensor, "*dims"], mask: Bool[Tensor, "*dims"], dim: int | None = None
) -> Float[Tensor, ...]:
    """Mean of the entries inside ``mask``, over one dimension or over all; 0 where none counts.

    Args:
        x: Any shape.
        mask: Same shape; True counts.
        dim: Dimension to average over; None: all of them.
    """
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def whiten(
    x: Float[Tensor, "*dims"],
    mask: Bool[Tensor, "*dims"],
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
) -> Float[Tensor, "*dims"]:
    """Scale the entries inside ``mask`` to variance 1, and shift them to mean 0.

        y = (x - mean) / √(var + eps)         with Bessel's correction in var

    Equal entries give 0, and so does a single one.

    Args:
        x: Any shape.
        mask: Same shape; True counts.
        shift_mean: False puts the mean back after scaling.
        eps: Added to the variance.

    Returns:
        The whitened entries, 0 outside ``mask``.
    """
    centered, mean = _centered(x, mask)
    whitened = centered * torch.rsqrt(_variance(centered, mask) + eps)
    return whitened if shift_mean else torch.where(mask, whitened + mean, 0.0)


def standardize(
    x: Float[Tensor, "*dims"], mask: Bool[Tensor, "*dims"], *, eps: float = 1e-4
) -> Float[Tensor, "*dims"]:
    """Z-score of the entries inside ``mask``, as TRL normalises advantages over a batch.

        y = (x - mean) / (std + eps)          with Bessel's correction in std

    Args:
        x: Any shape.
        mask: Same shape; True counts.
        eps: Added to the standard deviation, in units of ``x``.

    Returns:
        The z-scores, 0 outside ``mask``.
    """
    centered, _ = _centered(x, mask)
    return centered / (_variance(centered, mask).sqrt() + eps)


def _centered(
    x: Float[Tensor, "*dims"], mask: Bool[Tensor, "*dims"]
) -> tuple[Float[Tensor, "*dims"], Float[Tensor, ""]]:
    # Measured from one of the entries, equal ones have a mean of exactly 0; the rounding error of
    # a plain mean would be divided by a deviation as small as itself.
    origin = torch.where(mask, x, torch.finfo(x.dtype).min).amax()
    origin = torch.where(mask.any(), origin, 0.0)
    offset = masked_mean(x - origin, mask)
    return torch.where(mask, x - origin - offset, 0.0), origin + offset


def _variance(centered: Float[Tensor, "*dims"], mask: Bool[Tensor, "*dims"]) -> Float[Tensor, ""]:
    return masked_sum(centered.square(), mask) / (mask.sum() - 1).clamp(min=1)
