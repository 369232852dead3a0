"""Means and maxima over all ranks, from one reduction per iteration."""

from __future__ import annotations

import torch
from torch import Tensor

from lrlhf.strategies import Collectives

_FIRST, _SECOND = "#1", "#2"


class MetricSums:
    """Adds up numerators and denominators, so that ranks of different size weigh rightly."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}
        self._maxima: dict[str, Tensor] = {}

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

    def reduce(self, collectives: Collectives, device: torch.device) -> dict[str, float]:
        """Combine the ranks; each may have seen other names.

        Returns:
            The means and maxima by name; a mean of nothing is left out.
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


def _movable(values: Tensor, device: torch.device) -> Tensor:
    """Use float32 where the device has no float64."""
    return values.float().to(device) if device.type == "mps" else values.to(device)
