"""What can be read off the values of rewards: distributions, signal, correlations, odd rows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lrlhf.apps.lab.reward_lab.responses import Response
from lrlhf.statistics.correlation import Correlation, ranks, spearman_interval
from lrlhf.statistics.proportions import share_interval

SCORE = "score"
LENGTH = "length"
_ODD_ROWS = 20
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Share:
    """A part of so many."""

    count: int
    of: int
    interval: tuple[float, float]
    """Of 95 %, of `share_interval` with the prompts as clusters."""

    @property
    def value(self) -> float:
        """The share; NaN of nothing."""
        return self.count / self.of if self.of else math.nan


class Distribution(NamedTuple):
    """Of the finite values; NaN where there are none."""

    mean: float
    std: float
    low: float
    p5: float
    median: float
    p95: float
    high: float
    distinct: int


class Part(NamedTuple):
    """One reward function, or the score."""

    name: str
    missing: Share
    """Responses without a value."""
    distribution: Distribution
    within_groups: float
    """Share of the variance that is between responses to the same prompt; NaN: none varies."""
    no_signal: Share
    """Prompts, of those with two values or more, whose responses all have the same value."""
    with_length: Correlation


class OddRow(NamedTuple):
    """A response to look at."""

    response: Response
    value: float
    """What makes it odd: ranks between 0 and 1, or seconds."""
    detail: str


class StepOfRun(NamedTuple):
    """The same of one step of a run."""

    step: int
    responses: int
    means: Mapping[str, float]
    missing: float
    """Share of responses without a score."""
    no_signal: float
    """Share of prompts whose scores are all equal."""
    with_length: float


class CallTimes(NamedTuple):
    """Seconds of a function's calls, and of the same divided by the responses in each."""

    name: str
    calls: int
    call_p50: float
    call_p99: float
    response_p50: float
    response_p99: float


@dataclass(frozen=True, kw_only=True)
class Lab:
    """All that is told of the rewards of some responses."""

    responses: int
    prompts: int
    unit: str
    """Of lengths: ``tokens`` or ``characters``."""
    parts: Sequence[Part]
    """The score last."""
    correlations: Mapping[tuple[str, str], Correlation]
    """Of each two parts."""
    facts: Sequence[str]
    without_value: Mapping[str, Sequence[Response]]
    """Responses without a value by part."""
    short_and_high: Sequence[OddRow]
    disputed: Sequence[OddRow]
    steps: Sequence[StepOfRun]
    """Of a run."""
    times: Sequence[CallTimes] = ()
    slowest: Sequence[OddRow] = ()
    failures: Mapping[str, int] = field(default_factory=dict)
    """What went wrong, and in how many calls."""
    values: Mapping[str, Values] = field(default_factory=dict)
    """By part, one per response."""


def look_at(responses: Sequence[Response], unit: str = "tokens") -> Lab:
    """Describe what the rewards said of responses.

    Args:
        responses: At least one.
        unit: Of their lengths.
    """
    names = list(dict.fromkeys(name for response in responses for name in response.parts))
    values = {
        name: np.array([response.parts.get(name, math.nan) for response in responses])
        for name in names
    }
    values[SCORE] = np.array([response.score for response in responses])
    lengths = np.array([response.length for response in responses], np.float64)
    members = _members([response.group for response in responses])
    asked = [response.asked for response in responses]
    parts = [_part(name, own, lengths, asked, members) for name, own in values.items()]
    return Lab(
        responses=len(responses),
        prompts=len(members),
        unit=unit,
        parts=parts,
        correlations={
            (one, two): spearman_interval(values[one], values[two], asked)
            for one, two in combinations(names, 2)
        },
        facts=_facts(names, values, lengths),
        without_value={
            name: [responses[row] for row in np.flatnonzero(np.isnan(own)).tolist()]
            for name, own in values.items()
        },
        short_and_high=_short_and_high(responses, values[SCORE], lengths, unit),
        disputed=_disputed(responses, {name: values[name] for name in names}),
        steps=_steps(responses, values, lengths, members),
        values=values,
    )


def _members(groups: Sequence[Hashable]) -> list[NDArray[np.intp]]:
    rows: dict[Hashable, list[int]] = defaultdict(list)
    for row, group in enumerate(groups):
        rows[group].append(row)
    return [np.array(own) for own in rows.values()]


def _part(
    name: str,
    values: Values,
    lengths: Values,
    asked: Sequence[Hashable],
    members: Sequence[NDArray[np.intp]],
) -> Part:
    missing = np.isnan(values)
    there = values[~missing]
    compared = [rows for rows in members if len(_finite(values[rows])) > 1]
    of_groups = [_finite(values[rows]) for rows in compared]
    silent = [bool((own == own[0]).all()) for own in of_groups]
    within = sum(float(((own - own.mean()) ** 2).sum()) for own in of_groups)
    together = np.concatenate(of_groups) if of_groups else np.empty(0)
    total = float(((together - together.mean()) ** 2).sum()) if len(together) else 0.0
    return Part(
        name,
        _share(missing.tolist(), asked),
        _distribution(there),
        within / total if total > 0 else math.nan,
        _share(silent, [asked[rows[0]] for rows in compared]),
        spearman_interval(values, lengths, asked),
    )


def _share(outcomes: Sequence[bool], prompts: Sequence[Hashable]) -> Share:
    return Share(sum(outcomes), len(outcomes), share_interval(outcomes, prompts))


def _finite(values: Values) -> Values:
    there: Values = values[~np.isnan(values)]
    return there


def _distribution(values: Values) -> Distribution:
    if not len(values):
        none = math.nan
        return Distribution(none, none, none, none, none, none, none, 0)
    low, p5, median, p95, high = np.quantile(values, (0, 0.05, 0.5, 0.95, 1)).tolist()
    return Distribution(
        float(values.mean()),
        float(values.std()),
        low,
        p5,
        median,
        p95,
        high,
        len(np.unique(values)),
    )


def _facts(names: Sequence[str], values: Mapping[str, Values], lengths: Values) -> list[str]:
    """Tell what holds of every response; whether it should is for people to say."""
    facts = []
    for name in names:
        there = ~np.isnan(values[name])
        own = values[name][there]
        if not len(own):
            facts.append(f"{name} has no value for any response")
        elif (own == own[0]).all():
            facts.append(f"{name} gives every response the same value, {own[0]:g}")
        elif np.array_equal(ranks(own), ranks(lengths[there])):
            facts.append(f"{name} orders the responses exactly as their length does")
        elif np.array_equal(ranks(own), ranks(-lengths[there])):
            facts.append(f"{name} orders the responses exactly against their length")
    for one, two in combinations(names, 2):
        if np.array_equal(values[one], values[two], equal_nan=True):
            facts.append(f"{one} and {two} give every response the same value")
    return facts


def _percentiles(values: Values) -> Values:
    """Return the ranks of values from 0 to 1; NaN for NaN, and where no two differ."""
    there = ~np.isnan(values)
    shares = np.full(len(values), math.nan)
    if len(np.unique(values[there])) > 1:
        own = ranks(values[there])
        shares[there] = (own - own.min()) / (own.max() - own.min())
    return shares


def _short_and_high(
    responses: Sequence[Response], scores: Values, lengths: Values, unit: str
) -> list[OddRow]:
    """Return the responses whose score ranks highest above their length."""
    gaps = _percentiles(scores) - _percentiles(lengths)
    return [
        OddRow(
            responses[row],
            float(gaps[row]),
            f"score {scores[row]:.4g} for {responses[row].length:,} {unit}",
        )
        for row in _largest(gaps)
    ]


def _disputed(responses: Sequence[Response], values: Mapping[str, Values]) -> list[OddRow]:
    """Return the responses of whose rank two parts disagree most."""
    shares = {
        name: own for name, given in values.items() if len(_finite(own := _percentiles(given)))
    }
    if len(shares) < 2:
        return []
    table = np.array(list(shares.values()))
    known = (~np.isnan(table)).sum(axis=0) > 1
    gaps = np.full(len(responses), math.nan)
    gaps[known] = np.nanmax(table[:, known], axis=0) - np.nanmin(table[:, known], axis=0)
    rows = []
    for row in _largest(gaps):
        known_of = {name: values[name][row] for name in shares if not np.isnan(values[name][row])}
        told = ", ".join(f"{name} {value:.4g}" for name, value in known_of.items())
        rows.append(OddRow(responses[row], float(gaps[row]), told))
    return rows


def _largest(values: Values) -> list[int]:
    """Return the rows of the largest values above 0, the largest first."""
    order = np.argsort(-np.nan_to_num(values, nan=-np.inf), kind="stable")
    return [row for row in order[:_ODD_ROWS].tolist() if values[row] > 0]


def _steps(
    responses: Sequence[Response],
    values: Mapping[str, Values],
    lengths: Values,
    members: Sequence[NDArray[np.intp]],
) -> list[StepOfRun]:
    numbers = np.array([-1 if one.step is None else one.step for one in responses])
    groups_of: dict[int, list[Values]] = defaultdict(list)
    for rows in members:
        if len(own := _finite(values[SCORE][rows])) > 1:
            groups_of[int(numbers[rows[0]])].append(own)
    steps = []
    for step in np.unique(numbers[numbers >= 0]).tolist():
        rows = numbers == step
        scores, groups = values[SCORE][rows], groups_of[step]
        equal = sum(bool((own == own[0]).all()) for own in groups)
        steps.append(
            StepOfRun(
                step,
                int(rows.sum()),
                {name: _mean(own[rows]) for name, own in values.items()},
                float(np.isnan(scores).mean()),
                equal / len(groups) if groups else math.nan,
                spearman_interval(scores, lengths[rows], [0] * int(rows.sum())).value,
            )
        )
    return steps


def _mean(values: Values) -> float:
    own = _finite(values)
    return float(own.mean()) if len(own) else math.nan
