"""Means, maxima and percentiles over all ranks, from one reduction of each per iteration."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from lrlhf.functional.kl import MAX_LOG_RATIO
from lrlhf.run import Collectives

_Number = Tensor | float
"""A scalar where it was computed, or on the host."""

_FIRST, _SECOND = "#1", "#2"
_WIDE = torch.float64

_NEGATED = "/negated"
"""Of the smallest value the negative is kept, as the largest."""
BIN_WIDTH = 1e-3
"""Of the logarithms that percentiles are taken of: these are exact to 0.05 %."""

_PERCENTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
_MIDDLE = round(MAX_LOG_RATIO / BIN_WIDTH)


class MetricSums:
    """Adds up numerators and denominators, so that ranks of different size weigh rightly."""

    def __init__(self) -> None:
        self._sums: dict[str, list[tuple[_Number, _Number]]] = {}
        self._maxima: dict[str, list[_Number]] = {}
        self._histograms: dict[str, Tensor] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Count ``total`` over ``count`` observations towards the mean called ``name``."""
        self._sums.setdefault(name, []).append((_kept(total), _kept(count)))

    def add_values(self, name: str, values: Tensor) -> None:
        """Count every finite value towards the mean called ``name``."""
        finite = values.isfinite()
        self.add(name, torch.where(finite, values, 0.0).sum(dtype=_wide(values)), finite.sum())

    def add_of_algorithm(self, name: str, values: Tensor | float) -> None:
        """Count what an estimator or a loss logs, see `lrlhf.functional.algorithm.LogMetric`."""
        self.add_values(f"algorithm/{name}", torch.as_tensor(values).detach().float())

    def add_moments(self, name: str, values: Tensor) -> None:
        """Count every value towards the standard deviation (Bessel-corrected) called ``name``."""
        wide = values.to(_wide(values))
        self.add(f"{name}{_FIRST}", wide.sum(), float(values.numel()))
        self.add(f"{name}{_SECOND}", wide.square().sum(), float(values.numel()))

    def maximum(self, name: str, value: Tensor | float) -> None:
        """Keep the largest value called ``name``."""
        self._maxima.setdefault(name, []).append(_kept(value))

    def minimum(self, name: str, value: Tensor | float) -> None:
        """Keep the smallest value called ``name``."""
        self.maximum(f"{name}{_NEGATED}", -value)

    def add_range(self, name: str, values: Tensor) -> None:
        """Keep mean, smallest and largest value: ``<name>``, ``<name>_min`` and ``<name>_max``.

        Of no value there is nothing to keep.
        """
        if len(values):
            self.add_values(name, values)
            self.minimum(f"{name}_min", values.min())
            self.maximum(f"{name}_max", values.max())

    def add_quantiles(self, name: str, log_values: Tensor) -> None:
        """Count every value towards the percentiles of ``exp(log_values)``.

        They come out as ``<name>_p01``, ``<name>_p50`` and ``<name>_p99``, interpolated between
        values as ``numpy.quantile`` does. Logarithms are rounded to multiples of `BIN_WIDTH` and
        bounded to ±`MAX_LOG_RATIO`, so that counts of any number of ranks add up; NaN is left out.
        """
        # whole numbers of 64 bits are not for every device
        device = "cpu" if log_values.device.type == "mps" else log_values.device
        values = log_values.detach().flatten().float().to(device)
        known = ~values.isnan()
        bounded = values.nan_to_num(0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        bins = (bounded / BIN_WIDTH).round().long() + _MIDDLE
        histogram = self._histograms.get(name)
        if histogram is None:
            size = 2 * _MIDDLE + 1
            histogram = torch.zeros(size, dtype=torch.int64, device=device)
            self._histograms[name] = histogram
        # in whole numbers, whose sum does not depend on a device's order
        histogram.index_add_(0, bins.to(histogram.device), known.to(histogram))

    def reduce(self, collectives: Collectives, device: torch.device) -> dict[str, float]:
        """Combine the ranks; each may have seen other names.

        Returns:
            The means, maxima and percentiles by name; those of nothing are left out.
        """
        results: dict[str, float] = {}
        sums, maxima = self._read()
        names = collectives.union(sums)
        if names:
            table = torch.tensor([sums.get(name, (0.0, 0.0)) for name in names], dtype=_WIDE)
            table = collectives.sum(_movable(table, device)).cpu()
            counted = {name: pair.tolist() for name, pair in zip(names, table, strict=True)}
            results |= _deviations(counted)
            results |= {name: total / count for name, (total, count) in counted.items() if count}
        peaks = collectives.union(maxima)
        if peaks:
            largest = torch.tensor([maxima.get(name, -math.inf) for name in peaks], dtype=_WIDE)
            largest = collectives.max(_movable(largest, device)).cpu()
            for name, value in zip(peaks, largest.tolist(), strict=True):
                negated = name.endswith(_NEGATED)
                results[name.removesuffix(_NEGATED)] = -value if negated else value
        spreads = collectives.union(self._histograms)
        empty = torch.zeros(2 * _MIDDLE + 1, dtype=_WIDE)
        if spreads:
            counts = torch.stack(
                [self._histograms.get(name, empty).cpu().double() for name in spreads]
            )
            counts = collectives.sum(_movable(counts, device)).cpu()
            for name, histogram in zip(spreads, counts, strict=True):
                results |= _percentiles(name, histogram)
        return results

    def _read(self) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        """Bring what was kept on devices over, of each device in one go, and put it together."""
        pairs = [part for parts in self._sums.values() for part in parts]
        several = [value for values in self._maxima.values() for value in values]
        numbers = iter(_numbers([*(value for pair in pairs for value in pair), *several]))
        sums = {}
        for name, parts in self._sums.items():
            read = [(next(numbers), next(numbers)) for _ in parts]
            sums[name] = (sum(total for total, _ in read), sum(count for _, count in read))
        maxima = {
            # as torch has it: of NaN and a number NaN is the larger
            name: max((next(numbers) for _ in values), key=lambda value: (value != value, value))
            for name, values in self._maxima.items()
        }
        return sums, maxima


def _kept(value: Tensor | float) -> _Number:
    """Take a number down without waiting for the device it is on."""
    if not isinstance(value, Tensor):
        return float(value)
    # a copy: what it was may be written to
    return value.detach().to(_wide(value), copy=True)


def _wide(value: Tensor) -> torch.dtype:
    return torch.float32 if value.device.type == "mps" else _WIDE


def _numbers(values: Sequence[_Number]) -> list[float]:
    """Read numbers, all of one device at once."""
    read: list[float] = [0.0 if isinstance(value, Tensor) else value for value in values]
    devices: defaultdict[torch.device, list[int]] = defaultdict(list)
    for index, value in enumerate(values):
        if isinstance(value, Tensor):
            devices[value.device].append(index)
    for indices in devices.values():
        together = torch.stack([values[position] for position in indices])  # type: ignore[misc]
        for position, number in zip(indices, together.tolist(), strict=True):
            read[position] = number
    return read


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
    cumulated = histogram.long().cumsum(dim=0)
    count = int(cumulated[-1])
    if count == 0:
        return {}

    def ranked(index: int) -> float:
        positions = torch.searchsorted(cumulated, index, right=True)
        return math.exp((int(positions) - _MIDDLE) * BIN_WIDTH)

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
