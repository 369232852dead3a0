"""Two sides compared: metric by metric, subset by subset."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lrlhf import statistics
from lrlhf.apps.lab.compare.evaluations import (
    Groups,
    Key,
    RunEvaluation,
    Sample,
    grouped,
    is_share_of_answers,
    main_metric,
    most_samples,
    prompt_values,
    sizes_of,
)
from lrlhf.statistics import Estimate, Variances, Wins

Match = Literal["auto", "row", "text"]
_PROMPT = 2
"""Place of the prompt in the key of a text."""


class Side(NamedTuple):
    """What is compared: the runs of one recipe, which differ in their seeds."""

    name: str
    evaluations: list[RunEvaluation]


class Prompt(NamedTuple):
    """A prompt, or a pair, that all runs of both sides have."""

    key: Key
    """What it was matched by."""
    text: str
    columns: Mapping[str, Any]
    answers: tuple[str, str]
    """The first one of each side."""
    cluster: str = ""
    """See `Sample.cluster`."""


class Matched(NamedTuple):
    """Two sides over the prompts that they have in common."""

    prompts: list[Prompt]
    values: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]
    """Of each metric what the samples of a prompt come to, [seeds, prompts] of each side; NaN where
    there is none."""
    samples: tuple[int, int]
    """Most samples of one prompt at one temperature, of each side."""
    binary: frozenset[str]
    """Metrics that are 0 or 1 on each sample of both sides, or shares of right answers."""
    by: str
    """``row`` or ``text``."""
    unmatched: dict[str, int]
    """Prompts that a run has and another one has not, by run."""
    missing: tuple[str, ...] = ()
    """Metrics that a run has no value of."""


def match(a: Side, b: Side, by: Match = "auto", sizes: Sequence[int] = ()) -> Matched:
    """Find the prompts that every run of both sides has.

    Args:
        a: One side.
        b: The other.
        by: ``row``: by evaluation set, source and row. ``text``: by what was asked. ``auto``: by
            row where all lines have one and the texts of equal rows are equal, else by text.
        sizes: Each k of pass@k beside the usual ones.

    Raises:
        ValueError: They have none in common, or their lines do not say from which row they are.
    """
    runs = [*a.evaluations, *b.evaluations]
    placed = all(sample.place is not None for run in runs for sample in run.samples)
    if by == "row" and not placed:
        raise ValueError(
            "not all evaluations say from which source and row a line is; match them by text"
        )
    by_row = placed and by != "text"
    groups = [grouped(run.samples, by_row=by_row) for run in runs]
    if by_row and by == "auto" and (others := _different_texts(groups)):
        by_row, rows = False, len(set.intersection(*map(set, groups)))
        groups = [grouped(run.samples, by_row=False) for run in runs]
        if not set.intersection(*map(set, groups)):
            raise ValueError(
                f"{a.name} and {b.name} have {rows} rows of the same numbers, and on "
                f"{len(others)} of them another prompt (first {' '.join(others[0][-2:])}): they "
                "were evaluated on different data, or with different templates; --match row "
                "compares them nevertheless"
            )
    common = set.intersection(*map(set, groups))
    if not common:
        raise ValueError(
            f"{a.name} and {b.name} have no prompt in common ({len(groups[0])} and "
            f"{len(groups[-1])} prompts): evaluate them on the same data"
        )
    unmatched = {
        str(run.folder): len(own.keys() - common) for run, own in zip(runs, groups, strict=True)
    }
    keys = sorted(common, key=_in_order)
    split = len(a.evaluations)
    label = "row" if by_row else "text"
    return _matched(keys, groups[:split], groups[split:], label, unmatched, sizes)


def _matched(
    keys: Sequence[Key],
    a: Sequence[Groups],
    b: Sequence[Groups],
    by: str,
    unmatched: dict[str, int],
    sizes: Sequence[int],
) -> Matched:
    sides = [[{key: own[key] for key in keys} for own in side] for side in (a, b)]
    known = [[prompt_values(own, sizes) for own in side] for side in sides]
    names = dict.fromkeys(
        name for side in known for own in side for each in own.values() for name in each
    )
    values = {name: (_column(name, known[0]), _column(name, known[1])) for name in names}
    both = {name: columns for name, columns in values.items() if all(map(_any_finite, columns))}
    prompts = [_prompt(key, a[0][key], b[0][key]) for key in keys]
    most = [max(max(most_samples(own).values()) for own in side) for side in sides]
    no_shares = {
        f"{sample.label}{name}"
        for own in [*sides[0], *sides[1]]
        for samples in own.values()
        for sample in samples
        for name, value in sample.values.items()
        if value not in (0.0, 1.0)
    }
    binary = frozenset(n for n in both if is_share_of_answers(n) or n not in no_shares)
    return Matched(
        *(prompts, _without_copies(both), (most[0], most[1]), binary, by, unmatched),
        missing=tuple(name for name in values if name not in both),
    )


def _without_copies(
    values: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]],
) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Leave out a reward that is the score itself: one reward of weight 1."""
    score = values.get("score")
    return {
        name: sides
        for name, sides in values.items()
        if score is None
        or not name.startswith("rewards/")
        or not all(
            np.array_equal(own, other, equal_nan=True)
            for own, other in zip(sides, score, strict=True)
        )
    }


def _prompt(key: Key, a: Sequence[Sample], b: Sequence[Sample]) -> Prompt:
    first, second = (min(side, key=lambda each: each.label != "") for side in (a, b))
    text = "\n".join(filter(None, first.text[_PROMPT:]))
    return Prompt(key, text, first.columns, (first.answer, second.answer), first.cluster)


def _column(name: str, side: Sequence[Mapping[Key, Mapping[str, float]]]) -> NDArray[np.float64]:
    return np.array([[own[key].get(name, math.nan) for key in own] for own in side])


def _different_texts(groups: Sequence[Groups]) -> list[Key]:
    """Return the common rows whose texts are not the same in all runs."""
    common = set.intersection(*map(set, groups))
    return sorted(
        (key for key in common if len({own[key][0].text for own in groups}) > 1), key=_in_order
    )


def _any_finite(values: NDArray[np.float64]) -> bool:
    return bool(np.isfinite(values).any(axis=1).all())


def _in_order(key: Key) -> list[tuple[int, str]]:
    """Sort row 10 behind row 9."""
    return [(int(part) if part.isdecimal() else -1, part) for part in key]


_MOST_SUBSETS = 20
_POINTS = (0.01, 0.02, 0.05, 0.1)
_DEVIATIONS = (0.1, 0.2, 0.5)
Scores = NDArray[np.float64]


class Row(NamedTuple):
    """One metric over some prompts."""

    metric: str
    subset: str
    """Empty: all prompts."""
    prompts: int
    left_out: int
    """Prompts without a value in one of the runs."""
    binary: bool
    """Whether it is right or wrong on each sample: means are shares."""
    means: tuple[float, float]
    differing: int
    """Prompts on which the sides differ."""
    difference: Estimate
    wins: Wins
    adjusted_p: float
    """The p-value, corrected for the other tests of its family."""

    @property
    def name(self) -> str:
        """The metric, and the subset if there is one."""
        return " of ".join(filter(None, (self.metric, self.subset)))


class Need(NamedTuple):
    """What it takes to see a difference with 80 % power."""

    difference: float
    prompts: int | None
    """With as many seeds as now; None: no number is enough."""
    seeds: int | None
    """Of each side, with as many prompts as now; None: unknown, or no number is enough."""


class Power(NamedTuple):
    """What the prompts and seeds at hand can show of the main metric."""

    detectable: float
    """The difference that is found in 80 % of evaluations like this one."""
    variances: Variances
    needs: list[Need]


class RunComparison(NamedTuple):
    """Side B against side A."""

    a: Side
    b: Side
    matched: Matched
    main: Row
    others: list[Row]
    """The other metrics, over all prompts; with the subsets one family of tests."""
    subsets: list[Row]
    empty: list[str]
    """Metrics and subsets without a prompt that all runs have a value of."""
    power: Power | None
    """None: the prompts are too few, or nothing varies."""

    @property
    def seeds(self) -> tuple[int, int]:
        return len(self.a.evaluations), len(self.b.evaluations)


def compare_sides(
    a: Side,
    b: Side,
    *,
    metric: str | None = None,
    by: Sequence[str] = (),
    how: Match = "auto",
    differences: Sequence[float] = (),
) -> RunComparison:
    """Compare two sides over the prompts that all of their runs were evaluated on.

    The main metric is the one test that the comparison is made for. All others, and all subsets,
    are a family of their own, whose p-values are corrected (Holm); intervals are not.

    Args:
        a: What B is compared with.
        b: The other side.
        metric: The main one; None: `main_metric`.
        by: Columns of the rows; the main metric is also compared for each of their values.
        how: See `match`.
        differences: Of the main metric, to say what it takes to see them; none: a few usual ones.

    Raises:
        ValueError: The sides have no prompt, or not the metric or column, in common.
    """
    matched = match(a, b, how, sizes_of(metric))
    name = metric or main_metric(a.evaluations[0])
    if name not in matched.values:
        raise ValueError(
            f"no metric '{name}' that both sides have; there are "
            f"{', '.join(matched.values) or 'none'}"
        )
    everything = np.ones(len(matched.prompts), dtype=bool)
    main = _row(name, "", matched, everything)
    if main is None:
        raise ValueError(f"no prompt has the metric '{name}' in all runs")
    columns_of = {(other, ""): everything for other in matched.values if other != name}
    for column in _columns(by, matched):
        for label, chosen in _subsets(column, matched).items():
            columns_of[name, label] = chosen
    rows = {one: _row(*one, matched, chosen) for one, chosen in columns_of.items()}
    family = [row for row in rows.values() if row is not None]
    without = [one for one, row in rows.items() if row is None]
    empty = [*matched.missing, *(" of ".join(filter(None, one)) for one in without)]
    adjusted = statistics.holm([row.difference.p_value for row in family])
    family = [row._replace(adjusted_p=p) for row, p in zip(family, adjusted, strict=True)]
    others = [row for row in family if not row.subset]
    subsets = [row for row in family if row.subset]
    power = _power(matched, name, differences)
    return RunComparison(a, b, matched, main, others, subsets, empty, power)


def correct_for_several(comparisons: Sequence[RunComparison]) -> list[RunComparison]:
    """Correct the main p-values for as many sides as are compared with one (Holm)."""
    adjusted = statistics.holm([comparison.main.difference.p_value for comparison in comparisons])
    return [
        one._replace(main=one.main._replace(adjusted_p=p))
        for one, p in zip(comparisons, adjusted, strict=True)
    ]


def scores_of(
    matched: Matched, metric: str, chosen: NDArray[np.bool_] | None = None
) -> tuple[Scores, Scores, NDArray[np.bool_]]:
    """Return the values of both sides where all runs have one, and which prompts these are."""
    a, b = matched.values[metric]
    there = np.array(np.isfinite(a).all(axis=0) & np.isfinite(b).all(axis=0))
    if chosen is not None:
        there &= chosen
    return a[:, there], b[:, there], there


def _by_cluster(side: Scores, matched: Matched, there: NDArray[np.bool_]) -> Scores:
    """Put the pairs of one prompt together, so that the prompts are the independent cases.

    Each cluster counts as often as it has pairs: the mean over clusters is that over pairs.
    """
    keys = [
        prompt.cluster or prompt.key
        for prompt, chosen in zip(matched.prompts, there, strict=True)
        if chosen
    ]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    if len(numbers) == len(keys):
        return side
    sums = np.zeros((len(side), len(numbers)))
    np.add.at(sums.T, [numbers[key] for key in keys], side.T)
    return sums * (len(numbers) / len(keys))


def _row(metric: str, subset: str, matched: Matched, chosen: NDArray[np.bool_]) -> Row | None:
    """Compare over some prompts; None: none of them has the metric in all runs."""
    a, b, there = scores_of(matched, metric, chosen)
    if not there.any():
        return None
    means = (math.fsum(a.ravel()) / a.size, math.fsum(b.ravel()) / b.size)
    a, b = (_by_cluster(side, matched, there) for side in (a, b))
    difference = statistics.paired_difference(a, b)
    gaps = ~np.isclose(a.mean(axis=0), b.mean(axis=0), rtol=1e-9, atol=0)
    return Row(
        metric=metric,
        subset=subset,
        prompts=a.shape[1],
        left_out=int(chosen.sum() - there.sum()),
        binary=metric in matched.binary,
        means=means,
        differing=int(gaps.sum()),
        difference=difference,
        wins=statistics.wins(a, b),
        adjusted_p=difference.p_value,
    )


def _columns(by: Sequence[str], matched: Matched) -> list[str]:
    """Return the columns that subsets are made of: those given, and evaluation sets anyway."""
    sets = {prompt.columns.get("set") for prompt in matched.prompts}
    return list(dict.fromkeys([*(["set"] if len(sets) > 1 else []), *by]))


def _subsets(column: str, matched: Matched) -> dict[str, NDArray[np.bool_]]:
    values = [_value(prompt.columns, column) for prompt in matched.prompts]
    if all(value is None for value in values):
        known = sorted({name for prompt in matched.prompts for name in prompt.columns})
        raise ValueError(
            f"no column '{column}' in the evaluations; there are {', '.join(known) or 'none'}"
        )
    different = sorted(set(map(str, values)), key=lambda text: (len(text), text))
    if len(different) > _MOST_SUBSETS:
        if all(isinstance(value, int | float) for value in values):
            return _quartile_masks(column, np.array(values, dtype=np.float64))
        raise ValueError(
            f"column '{column}' has {len(different)} different values; subsets are made of up to "
            f"{_MOST_SUBSETS}, or of numbers"
        )
    texts = np.array(list(map(str, values)))
    return {f"{column}={value}": texts == value for value in different}


def _quartile_masks(column: str, values: NDArray[np.float64]) -> dict[str, NDArray[np.bool_]]:
    """Split numbers at their quartiles."""
    ends = np.unique(np.quantile(values, [0, 0.25, 0.5, 0.75, 1]))
    quarters = {}
    for low, high in itertools.pairwise(ends):
        last = high == ends[-1]
        chosen = (values >= low) & ((values <= high) if last else (values < high))
        quarters[f"{column} {low:g} to {'' if last else 'below '}{high:g}"] = chosen
    return {label: chosen for label, chosen in quarters.items() if chosen.any()}


def _value(columns: Mapping[str, Any], name: str) -> Any:
    """Return a column, or ``metadata.level`` of one that has parts; None: there is none."""
    if name in columns:
        return columns[name]
    head, _, rest = name.partition(".")
    inner = columns.get(head)
    return _value(inner, rest) if rest and isinstance(inner, Mapping) else None


def _power(matched: Matched, metric: str, differences: Sequence[float]) -> Power | None:
    a, b, there = scores_of(matched, metric)
    a, b = (_by_cluster(side, matched, there) for side in (a, b))
    count, seeds = a.shape[1], (len(a), len(b))
    if count < 2:
        return None
    spread = statistics.variances(a, b)
    detectable = statistics.detectable_difference(spread, prompts=count, seeds=seeds)
    if not 0 < detectable < math.inf:
        return None
    if not differences:
        deviation = float(np.concatenate([a, b]).std())
        usual = [float(f"{part * deviation:.1g}") for part in _DEVIATIONS]
        differences = _POINTS if metric in matched.binary else sorted(set(usual) - {0.0})
    several = min(seeds) > 1
    needs = [
        Need(
            size,
            statistics.prompts_needed(spread, size, seeds=seeds),
            statistics.seeds_needed(spread, size, prompts=count) if several else None,
        )
        for size in differences
    ]
    return Power(detectable, spread, needs)
