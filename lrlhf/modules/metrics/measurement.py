"""What an evaluation has found, one number at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from lrlhf.statistics.intervals import Outcomes, likely_bounds, mean_interval, share_interval


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
    headline: bool = False
    """Log its interval too, as of what measures answers."""


@runtime_checkable
class HasMeasurements(Protocol):
    """A module that keeps what its last evaluation has found."""

    measurements: Sequence[Measurement]


def measured_mean(name: str, values: Sequence[float]) -> Measurement:
    """Return the mean of one value of each prompt, NaN left out."""
    what = name.rpartition("/")[2].split("@")[0]
    is_share = what in ("pass", "maj", "truncated_fraction")
    found = mean_interval(values, bounds=(0.0, 1.0) if is_share else likely_bounds(values))
    return Measurement(name, *found, headline=what in ("score", "pass", "maj"))


def measured_share(name: str, found: Outcomes) -> Measurement:
    """Return a share with Wilson's interval, by the number of clusters."""
    share = sum(found.outcomes) / len(found.outcomes)
    low, high = share_interval(*found)
    return Measurement(name, share, low, high, len({*found.clusters}), headline=True)


def logged_values(found: Iterable[Measurement]) -> dict[str, float]:
    """Return what is logged: of what measures answers, the ends of the interval too."""
    values = {}
    for one in found:
        values[one.name] = one.value
        if one.headline and not math.isnan(one.low):
            values |= {f"{one.name}_low": one.low, f"{one.name}_high": one.high}
    return values
