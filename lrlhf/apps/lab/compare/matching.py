"""The same prompts in the evaluations of two sides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lrlhf.apps.lab.compare.evaluations import Evaluation
from lrlhf.apps.lab.compare.samples import (
    Groups,
    Key,
    Sample,
    grouped,
    is_share_of_answers,
    most_samples,
    prompt_values,
)

Match = Literal["auto", "row", "text"]
_PROMPT = 2
"""Place of the prompt in the key of a text."""


class Side(NamedTuple):
    """What is compared: the runs of one recipe, which differ in their seeds."""

    name: str
    evaluations: list[Evaluation]


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
    found = None
    if placed and by != "text":
        found = groups_by_row = [grouped(run.samples, by_row=True) for run in runs]
        others = _different_texts(found)
        if others and by == "auto":
            found = None
            by_text = [grouped(run.samples, by_row=False) for run in runs]
            if not set.intersection(*map(set, by_text)):
                shared = set.intersection(*map(set, groups_by_row))
                raise ValueError(
                    f"{a.name} and {b.name} have {len(shared)} rows of the same numbers, and on "
                    f"{len(others)} of them another prompt (first {' '.join(others[0][-2:])}): "
                    "they were evaluated on different data, or with different templates; --match "
                    "row compares them nevertheless"
                )
    groups = found or [grouped(run.samples, by_row=False) for run in runs]
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
    label = "row" if found else "text"
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
        name for side in known for own in side for one in own.values() for name in one
    )
    values = {name: (_column(name, known[0]), _column(name, known[1])) for name in names}
    both = {name: columns for name, columns in values.items() if all(map(_any_finite, columns))}
    prompts = [_prompt(key, a[0][key], b[0][key]) for key in keys]
    most = [max(max(most_samples(own).values()) for own in side) for side in sides]
    no_shares = _with_other_values([*sides[0], *sides[1]])
    binary = frozenset(n for n in both if is_share_of_answers(n) or n not in no_shares)
    return Matched(prompts, _without_copies(both), (most[0], most[1]), binary, by, unmatched)


def _with_other_values(runs: Sequence[Groups]) -> set[str]:
    """Return the metrics that are neither 0 nor 1 on some sample."""
    return {
        f"{sample.label}{name}"
        for own in runs
        for samples in own.values()
        for sample in samples
        for name, value in sample.values.items()
        if value not in (0.0, 1.0)
    }


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
    first, second = (min(side, key=lambda one: one.label != "") for side in (a, b))
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
