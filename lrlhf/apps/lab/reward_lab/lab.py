"""What can be read off the values of rewards: distributions, signal, correlations, odd rows."""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from lrlhf.apps.lab.page import Cell, Chart, Number, Section, Table, Text, print_page, write_page
from lrlhf.apps.lab.run_files import RunFiles, plain_json
from lrlhf.statistics.correlation import Correlation, ranks, spearman_interval
from lrlhf.statistics.intervals import share_interval

SCORE = "score"
_ODD_ROWS = 20
Values = NDArray[np.float64]

_EXCERPT = 300


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response and its values."""

    place: str
    """File and line."""
    group: Hashable
    """Responses to one prompt, of one step, have the same."""
    prompt_key: Hashable
    """Responses to one prompt, of whatever step, have the same: they resemble each other."""
    step: int | None
    prompt: str
    """The end of it."""
    completion: str
    """The beginning of it."""
    length: int
    """In the unit of the `Lab`."""
    score: float
    """NaN: none."""
    parts: Mapping[str, float]
    """What each reward function returned; NaN: nothing."""


def responses_of_run(folder: str | Path) -> list[Response]:
    """Read the responses of a run.

    Raises:
        FileNotFoundError: There is no such folder, or it has no ``rollouts.jsonl``.
        ValueError: A line is no record of a rollout; names file and line.
    """
    run = RunFiles(folder)
    path = run.folder / "rollouts.jsonl"
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} has no rollouts.jsonl: the run has the callback RolloutLog switched off, or "
            "trains no policy"
        )
    responses = []
    for number, record in enumerate(run.responses(), start=1):
        try:
            responses.append(_of_record(record, f"{path.name}:{number}"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number} is no record of a rollout ({type(error).__name__}: {error})"
            ) from error
    if not responses:
        raise ValueError(f"{path} is empty: there are no responses yet")
    return responses


def _of_record(record: Mapping[str, Any], place: str) -> Response:
    group = (record["step"], record.get("rank", 0), record["group"])
    return Response(
        place=place,
        group=group,
        prompt_key=(record["source"], record.get("row")) if record.get("source") else group,
        step=int(record["step"]),
        prompt=end_of(str(record["prompt"])),
        completion=beginning_of(str(record["completion"])),
        length=int(record["length"]),
        score=_score(record["score"]),
        parts={str(name): _score(value) for name, value in record["rewards"].items()},
    )


def _score(value: float | None) -> float:
    return math.nan if value is None else float(value)


def end_of(text: str) -> str:
    """Return the end of a prompt, which is where the question is."""
    return text if len(text) <= _EXCERPT else f"…{text[-_EXCERPT:]}"


def beginning_of(text: str) -> str:
    """Return the beginning of a completion."""
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}…"


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


class RewardStats(NamedTuple):
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
    parts: Sequence[RewardStats]
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
    prompts = [response.prompt_key for response in responses]
    parts = [_part(name, own, lengths, prompts, members) for name, own in values.items()]
    return Lab(
        responses=len(responses),
        prompts=len(members),
        unit=unit,
        parts=parts,
        correlations={
            (one, two): spearman_interval(values[one], values[two], prompts)
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
    prompts: Sequence[Hashable],
    members: Sequence[NDArray[np.intp]],
) -> RewardStats:
    missing = np.isnan(values)
    there = values[~missing]
    compared = [rows for rows in members if len(_finite(values[rows])) > 1]
    of_groups = [_finite(values[rows]) for rows in compared]
    silent = [bool((own == own[0]).all()) for own in of_groups]
    within = sum(float(((own - own.mean()) ** 2).sum()) for own in of_groups)
    together = np.concatenate(of_groups) if of_groups else np.empty(0)
    total = float(((together - together.mean()) ** 2).sum()) if len(together) else 0.0
    return RewardStats(
        name,
        _share(missing.tolist(), prompts),
        _distribution(there),
        within / total if total > 0 else math.nan,
        _share(silent, [prompts[rows[0]] for rows in compared]),
        spearman_interval(values, lengths, prompts),
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
    mean, std = float(values.mean()), float(values.std())
    return Distribution(mean, std, low, p5, median, p95, high, len(np.unique(values)))


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
        name: own
        for name, values_of in values.items()
        if len(_finite(own := _percentiles(values_of)))
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
        listed = ", ".join(f"{name} {value:.4g}" for name, value in known_of.items())
        rows.append(OddRow(responses[row], float(gaps[row]), listed))
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
    numbers = np.array([-1 if response.step is None else response.step for response in responses])
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


DISCLAIMER = (
    "This is an audit: it tells what the values are, and raises no alarm. Whether a reward is "
    "exploited, only reading the responses tells."
)
_STEPS, _ROWS, _WIDTH = 10, 50, 100
"""Steps, and rows without a value, that tables have at most; letters of a line on a terminal."""
_BINS = 40
_VALUES = (
    *("part", "without value", "mean", "std", "min", "5 %", "median", "95 %", "max", "distinct"),
)
_SIGNAL = (
    *("part", "variance within prompts", "prompts without signal", "rank correlation with length"),
)
_PAIRS = ("part", "other part", "Spearman", "responses")
_TIME_COLUMNS = ("part", "calls", "s per call p50", "p99", "s per response p50", "p99")


def as_text(lab: Lab) -> str:
    """Return the report as lines for a terminal."""
    file = io.StringIO()
    sections = [Section("", [Text(_lead(lab))]), *_sections(lab)]
    print_page(sections, Console(file=file, width=_WIDTH, highlight=False))
    return file.getvalue()


def as_page(lab: Lab, path: str | Path, title: str) -> Path:
    """Write the report as one HTML file.

    Args:
        lab: What to write.
        path: The ``.html`` file.
        title: Of the page.

    Raises:
        ImportError: plotly is not installed; says how to install it.
    """
    return write_page(path, title, _sections(lab), _lead(lab))


def as_json(lab: Lab) -> dict[str, Any]:
    """Return the report in JSON types: all figures, and the places of all rows without a value."""
    plain: dict[str, Any] = plain_json(
        {
            "what": DISCLAIMER,
            "responses": lab.responses,
            "prompts": lab.prompts,
            "length_unit": lab.unit,
            "parts": [_part_json(part) for part in lab.parts],
            "correlations": [
                {"parts": names, **found._asdict()} for names, found in lab.correlations.items()
            ],
            "facts": lab.facts,
            "without_value": {
                name: [row.place for row in rows] for name, rows in lab.without_value.items()
            },
            "short_and_high": _rows_json(lab.short_and_high),
            "disputed": _rows_json(lab.disputed),
            "slowest": _rows_json(lab.slowest),
            "times": lab.times,
            "failures": lab.failures,
            "steps": lab.steps,
        }
    )
    return plain


def _part_json(part: RewardStats) -> dict[str, Any]:
    shares = {"missing": part.missing, "no_signal": part.no_signal}
    return {
        "name": part.name,
        **part.distribution._asdict(),
        **{name: {**vars(own), "share": own.value} for name, own in shares.items()},
        "within_groups": part.within_groups,
        "with_length": part.with_length,
    }


def _rows_json(rows: Sequence[OddRow]) -> list[dict[str, Any]]:
    return [
        {
            "place": row.response.place,
            "value": row.value,
            "detail": row.detail,
            "prompt": row.response.prompt,
            "completion": row.response.completion,
        }
        for row in rows
    ]


def _lead(lab: Lab) -> str:
    counts = f"{lab.responses:,} responses to {lab.prompts:,} prompts; lengths in {lab.unit}."
    return f"{counts} {DISCLAIMER}"


def _sections(lab: Lab) -> list[Section]:
    sections = [Section("Values", _overview(lab))]
    if lab.steps:
        sections.append(Section("Steps", _steps_parts(lab)))
    if lab.times:
        slowest = _odd("Slowest calls", "seconds per response", lab.slowest)
        sections.append(Section("Time", [Table(_TIME_COLUMNS, lab.times), slowest]))
    above = "rank above that of the length"
    short = _odd("High score for a short response", above, lab.short_and_high)
    disputed = _odd("Parts disagree", "distance of the ranks", lab.disputed)
    missing = [_without(name, rows) for name, rows in lab.without_value.items() if rows]
    return [*sections, Section("Rows to look at", [short, disputed, *missing])]


def _overview(lab: Lab) -> list[Text | Table | Chart]:
    pairs = [
        [*names, _coefficient(found), found.pairs] for names, found in lab.correlations.items()
    ]
    return [
        *(Text(f"{fact}.") for fact in lab.facts),
        *(Text(f"In {count} calls: {failure}") for failure, count in lab.failures.items()),
        Table(_VALUES, [_values_of(part) for part in lab.parts]),
        Table(_SIGNAL, [_signal_of(part) for part in lab.parts], title="Signal and length"),
        *([Table(_PAIRS, pairs, title="Parts with each other")] if pairs else []),
        *(_histogram(lab, part) for part in lab.parts),
    ]


def _histogram(lab: Lab, part: RewardStats) -> Chart:
    values = [value for value in lab.values[part.name].tolist() if not math.isnan(value)]
    trace = {"type": "histogram", "x": values, "nbinsx": _BINS, "name": part.name}
    layout = {"xaxis": {"title": {"text": part.name}}, "yaxis": {"title": {"text": "responses"}}}
    return Chart([trace], layout, title=f"{part.name}: values", height=220)


def _steps_parts(lab: Lab) -> list[Text | Table | Chart]:
    means = {name: [step.means[name] for step in lab.steps] for name in lab.values}
    shares = {
        "responses without score": [step.missing for step in lab.steps],
        "prompts without signal": [step.no_signal for step in lab.steps],
        "rank correlation of score and length": [step.with_length for step in lab.steps],
    }
    numbers, last = [step.step for step in lab.steps], len(lab.steps) - 1
    rows = sorted({round(k * last / (_STEPS - 1)) for k in range(_STEPS)})
    cells = [
        [numbers[row], *(plain_json(own[row]) for own in (means[SCORE], *shares.values()))]
        for row in rows
    ]
    note = f"{len(rows)} of {len(numbers)}; the JSON report has all." if len(rows) <= last else ""
    return [
        Table(["step", "score", *shares], cells, note=note),
        _lines(numbers, means, "Means by step"),
        _lines(numbers, shares, "Signal by step"),
    ]


def _lines(steps: Sequence[int], curves: Mapping[str, Sequence[float]], title: str) -> Chart:
    traces = [
        {"type": "scatter", "mode": "lines", "name": name, "x": steps, "y": plain_json(values)}
        for name, values in curves.items()
    ]
    return Chart(traces, {"xaxis": {"title": {"text": "step"}}}, title)


def _odd(title: str, what: str, rows: Sequence[OddRow]) -> Table:
    cells: list[list[Cell]] = [
        [row.response.place, row.detail, row.value, row.response.prompt, row.response.completion]
        for row in rows
    ]
    columns = ["row", "values", what, "prompt", "completion"]
    return Table(columns, cells, title=title, to_read=True)


def _without(name: str, rows: Sequence[Response]) -> Table:
    more = len(rows) - _ROWS
    return Table(
        ["row", "prompt", "completion"],
        [[row.place, row.prompt, row.completion] for row in rows[:_ROWS]],
        title=f"Without a value of {name}",
        note=f"{more:,} more are in the JSON report." if more > 0 else "",
        to_read=True,
    )


def _values_of(part: RewardStats) -> list[Cell]:
    return [part.name, _percent(part.missing), *plain_json(list(part.distribution))]


def _signal_of(part: RewardStats) -> list[Cell]:
    within = _number(part.within_groups, f"{part.within_groups:.1%}")
    return [part.name, within, _percent(part.no_signal), _coefficient(part.with_length)]


def _percent(share: Share) -> Number | None:
    low, high = share.interval
    return _number(share.value, f"{share.value:.1%} ({low:.1%} to {high:.1%})")


def _coefficient(correlation: Correlation) -> Number | None:
    interval = (
        "" if math.isnan(correlation.low) else f" ({correlation.low:.2f} to {correlation.high:.2f})"
    )
    return _number(correlation.value, f"{correlation.value:.2f}{interval}")


def _number(value: float, text: str) -> Number | None:
    return None if math.isnan(value) else Number(value, text)
