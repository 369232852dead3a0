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
    interval = mean_interval(values, bounds=(0.0, 1.0) if is_share else likely_bounds(values))
    return Measurement(name, *interval, headline=what in ("score", "pass", "maj"))


def measured_share(name: str, outcomes: Outcomes) -> Measurement:
    """Return a share with Wilson's interval, by the number of clusters."""
    share = sum(outcomes.outcomes) / len(outcomes.outcomes)
    low, high = share_interval(*outcomes)
    return Measurement(name, share, low, high, len({*outcomes.clusters}), headline=True)


def logged_values(measurements: Iterable[Measurement]) -> dict[str, float]:
    """Return what is logged: of what measures answers, the ends of the interval too."""
    values = {}
    for each in measurements:
        values[each.name] = each.value
        if each.headline and not math.isnan(each.low):
            values |= {f"{each.name}_low": each.low, f"{each.name}_high": each.high}
    return values
