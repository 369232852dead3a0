"""Two sides compared: metric by metric, subset by subset."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lrlhf.apps.lab.compare.evaluations import main_metric
from lrlhf.apps.lab.compare.matching import Match, Matched, Side, match
from lrlhf.apps.lab.compare.samples import sizes_of
from lrlhf.statistics import (
    Estimate,
    Variances,
    Wins,
    detectable_difference,
    holm,
    paired_difference,
    prompts_needed,
    seeds_needed,
    variances,
    wins,
)

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


class Comparison(NamedTuple):
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
        """Runs of each side."""
        return len(self.a.evaluations), len(self.b.evaluations)


def compare_sides(
    a: Side,
    b: Side,
    *,
    metric: str | None = None,
    by: Sequence[str] = (),
    how: Match = "auto",
    differences: Sequence[float] = (),
) -> Comparison:
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
    asked = {(other, ""): everything for other in matched.values if other != name}
    for column in _columns(by, matched):
        for label, chosen in _subsets(column, matched).items():
            asked[name, label] = chosen
    found = {one: _row(*one, matched, chosen) for one, chosen in asked.items()}
    family = [row for row in found.values() if row is not None]
    empty = [" of ".join(filter(None, one)) for one, row in found.items() if row is None]
    adjusted = holm([row.difference.p_value for row in family])
    family = [row._replace(adjusted_p=p) for row, p in zip(family, adjusted, strict=True)]
    others = [row for row in family if not row.subset]
    subsets = [row for row in family if row.subset]
    power = _power(matched, name, differences)
    return Comparison(a, b, matched, main, others, subsets, empty, power)


def correct_for_several(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Correct the main p-values for as many sides as are compared with one (Holm)."""
    adjusted = holm([one.main.difference.p_value for one in comparisons])
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
    difference = paired_difference(a, b)
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
        wins=wins(a, b),
        adjusted_p=difference.p_value,
    )


def _columns(by: Sequence[str], matched: Matched) -> list[str]:
    """Return the columns that subsets are made of: those given, and evaluation sets anyway."""
    sets = {prompt.columns.get("set") for prompt in matched.prompts}
    return list(dict.fromkeys([*(["set"] if len(sets) > 1 else []), *by]))


def _subsets(column: str, matched: Matched) -> dict[str, NDArray[np.bool_]]:
    found = [_value(prompt.columns, column) for prompt in matched.prompts]
    if all(value is None for value in found):
        known = sorted({name for prompt in matched.prompts for name in prompt.columns})
        raise ValueError(
            f"no column '{column}' in the evaluations; there are {', '.join(known) or 'none'}"
        )
    different = sorted(set(map(str, found)), key=lambda text: (len(text), text))
    if len(different) > _MOST_SUBSETS:
        if all(isinstance(value, int | float) for value in found):
            return _quarters(column, np.array(found, dtype=np.float64))
        raise ValueError(
            f"column '{column}' has {len(different)} different values; subsets are made of up to "
            f"{_MOST_SUBSETS}, or of numbers"
        )
    texts = np.array(list(map(str, found)))
    return {f"{column}={value}": texts == value for value in different}


def _quarters(column: str, values: NDArray[np.float64]) -> dict[str, NDArray[np.bool_]]:
    """Split numbers at their quartiles."""
    ends = np.unique(np.quantile(values, [0, 0.25, 0.5, 0.75, 1]))
    found = {}
    for low, high in itertools.pairwise(ends):
        last = high == ends[-1]
        chosen = (values >= low) & ((values <= high) if last else (values < high))
        found[f"{column} {low:g} to {'' if last else 'below '}{high:g}"] = chosen
    return {label: chosen for label, chosen in found.items() if chosen.any()}


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
    spread = variances(a, b)
    detectable = detectable_difference(spread, prompts=count, seeds=seeds)
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
            prompts_needed(spread, size, seeds=seeds),
            seeds_needed(spread, size, prompts=count) if several else None,
        )
        for size in differences
    ]
    return Power(detectable, spread, needs)
