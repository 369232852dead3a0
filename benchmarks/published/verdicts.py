"""What an interval says of a claim."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lrlhf.statistics import mean_interval

Measures = Mapping[str, Any]
"""What one run has shown, by name."""
Effect = Callable[[Mapping[str, Measures]], float]
"""From the measures of every variant under one seed to the size of the effect."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement of a paper: that the mean effect lies inside a range.

    Args:
        text: The statement.
        paper: What the paper reports.
        effect: The effect in one seed, positive in the paper's direction.
        above: The effect exceeds this. 0 for "better", minus a margin for "no worse".
        below: The effect stays below this.
        unit: Of the effect.
    """

    text: str
    paper: str
    effect: Effect
    above: float = 0.0
    below: float = math.inf
    unit: str = "score"


class Finding(NamedTuple):
    """A claim as measured."""

    mean: float
    low: float
    high: float
    verdict: str
    effects: Sequence[float]
    """One per seed."""


def judge(claim: Claim, seeds: Sequence[Mapping[str, Measures]]) -> Finding:
    """Measure a claim over the seeds, paired.

    Args:
        claim: What is claimed.
        seeds: For each seed the measures of every variant.
    """
    effects = [claim.effect(one) for one in seeds]
    mean, low, high, _ = mean_interval(effects)
    return Finding(mean, low, high, verdict(low, high, claim.above, claim.below), effects)


def verdict(low: float, high: float, above: float = 0.0, below: float = math.inf) -> str:
    """Say what an interval shows of the claim that a mean lies between two bounds.

    "seen": the whole interval does. "contradicted": the whole interval lies outside, on one side.
    "not seen at this size": anything else, such as an interval that holds a bound, or none at all
    (NaN).
    """
    if low > above and high < below:
        return "seen"
    if high < above or low > below:
        return "contradicted"
    return "not seen at this size"


def difference(better: str, worse: str, measure: str) -> Effect:
    """Return the effect: a measure of one variant minus that of another."""
    return lambda runs: float(runs[better][measure]) - float(runs[worse][measure])
