"""What an evaluation has found, one number at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from lrlhf.statistics.intervals import mean_interval


class Measurement(NamedTuple):
    """A metric of an evaluation with its 95 % interval."""

    name: str
    """As it is logged."""
    value: float
    low: float
    """NaN, as ``high``: none is known."""
    high: float
    number: int
    """Of independent observations behind it, such as prompts; 0: not known."""


@runtime_checkable
class HasMeasurements(Protocol):
    """A module that keeps what its last evaluation has found."""

    measurements: Sequence[Measurement]


def measured_mean(name: str, values: Sequence[float]) -> Measurement:
    """Return the mean of one value of each prompt, NaN left out."""
    is_share = name.rpartition("/")[2].split("@")[0] in ("pass", "maj", "truncated_fraction")
    bounds = (0.0, 1.0) if is_share else (-math.inf, math.inf)
    return Measurement(name, *mean_interval(values, bounds=bounds))


def logged_values(found: Iterable[Measurement]) -> dict[str, float]:
    """Return what is logged: of what measures answers, the ends of the interval too."""
    values = {}
    for one in found:
        values[one.name] = one.value
        headline = one.name.rpartition("/")[2].split("@")[0] in ("score", "pass", "maj")
        if headline and not math.isnan(one.low):
            values |= {f"{one.name}_low": one.low, f"{one.name}_high": one.high}
    return values
