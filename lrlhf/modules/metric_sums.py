"""Means, maxima and percentiles over all ranks, from one reduction of each per iteration."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lrlhf.functional.kl import MAX_LOG_RATIO
from lrlhf.strategies import Collectives

_FIRST, _SECOND = "#1", "#2"

BIN_WIDTH = 1e-3
"""Of the logarithms that percentiles are taken of: these are exact to 0.05 %."""

_PERCENTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
_MIDDLE = round(MAX_LOG_RATIO / BIN_WIDTH)


class MetricSums:
    """Adds up numerators and denominators, so that ranks of different size weigh rightly."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}
        self._maxima: dict[str, Tensor] = {}
        self._histograms: dict[str, Tensor] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Count ``total`` over ``count`` observations towards the mean called ``name``."""
        pair = torch.stack(
            [torch.as_tensor(part, dtype=torch.float64).detach().cpu() for part in (total, count)]
        )
        self._sums.setdefault(name, []).append(pair)

    def add_values(self, name: str, values: Tensor) -> None:
        """Count every finite value towards the mean called ``name``."""
        finite = values[values.isfinite()]
        self.add(name, finite.double().sum(), float(finite.numel()))

    def add_moments(self, name: str, values: Tensor) -> None:
        """Count every value towards the standard deviation (Bessel-corrected) called ``name``."""
        self.add(f"{name}{_FIRST}", values.double().sum(), float(values.numel()))
        self.add(f"{name}{_SECOND}", values.double().square().sum(), float(values.numel()))

    def maximum(self, name: str, value: Tensor | float) -> None:
        """Keep the largest value called ``name``."""
        value = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
        known = self._maxima.get(name)
        self._maxima[name] = value if known is None else torch.maximum(known, value)

    def add_quantiles(self, name: str, log_values: Tensor) -> None:
        """Count every value towards the percentiles of ``exp(log_values)``.

        They come out as ``<name>_p01``, ``<name>_p50`` and ``<name>_p99``, interpolated between
        values as ``numpy.quantile`` does. Logarithms are rounded to multiples of `BIN_WIDTH` and
        bounded to ±`MAX_LOG_RATIO`, so that counts of any number of ranks add up; NaN is left out.
        """
        known = log_values[~log_values.isnan()].float().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        bins = (known / BIN_WIDTH).round().long() + _MIDDLE
        counts = torch.bincount(bins, minlength=2 * _MIDDLE + 1).cpu().double()
        self._histograms[name] = self._histograms.get(name, 0) + counts

    def reduce(self, collectives: Collectives, device: torch.device) -> dict[str, float]:
        """Combine the ranks; each may have seen other names.

        Returns:
            The means, maxima and percentiles by name; those of nothing are left out.
        """
        results: dict[str, float] = {}
        names = collectives.union(self._sums)
        nothing = torch.zeros(2, dtype=torch.float64)
        if names:
            table = torch.stack([sum(self._sums.get(name, []), nothing) for name in names])
            table = collectives.sum(_movable(table, device)).cpu()
            counted = {name: pair.tolist() for name, pair in zip(names, table, strict=True)}
            results |= _deviations(counted)
            results |= {name: total / count for name, (total, count) in counted.items() if count}
        peaks = collectives.union(self._maxima)
        lowest = torch.tensor(-torch.inf, dtype=torch.float64)
        if peaks:
            largest = torch.stack([self._maxima.get(name, lowest) for name in peaks])
            largest = collectives.max(_movable(largest, device)).cpu()
            results |= dict(zip(peaks, largest.tolist(), strict=True))
        spreads = collectives.union(self._histograms)
        empty = torch.zeros(2 * _MIDDLE + 1, dtype=torch.float64)
        if spreads:
            counts = torch.stack([self._histograms.get(name, empty) for name in spreads])
            counts = collectives.sum(_movable(counts, device)).cpu()
            for name, histogram in zip(spreads, counts, strict=True):
                results |= _percentiles(name, histogram)
        return results


def _deviations(counted: dict[str, list[float]]) -> dict[str, float]:
    """Replace pairs of first and second moments by standard deviations."""
    deviations = {}
    for first_name in [name for name in counted if name.endswith(_FIRST)]:
        name = first_name.removesuffix(_FIRST)
        first, count = counted.pop(first_name)
        second, _ = counted.pop(f"{name}{_SECOND}")
        if count > 1:
            variance = max(0.0, second - first * first / count) / (count - 1)
            deviations[name] = variance**0.5
    return deviations


def _percentiles(name: str, histogram: Tensor) -> dict[str, float]:
    """Read percentiles off a histogram of logarithms."""
    cumulated = histogram.double().cumsum(dim=0)
    count = int(cumulated[-1])
    if count == 0:
        return {}

    def ranked(index: int) -> float:
        found = torch.searchsorted(cumulated, float(index), right=True)
        return math.exp((int(found) - _MIDDLE) * BIN_WIDTH)

    results = {}
    for suffix, share in _PERCENTILES.items():
        position = share * (count - 1)
        below = ranked(math.floor(position))
        above = ranked(math.ceil(position))
        results[f"{name}_{suffix}"] = below + (position % 1) * (above - below)
    return results


def _movable(values: Tensor, device: torch.device) -> Tensor:
    """Use float32 where the device has no float64."""
    return values.float().to(device) if device.type == "mps" else values.to(device)
