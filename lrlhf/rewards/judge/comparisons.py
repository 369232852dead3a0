"""Which responses a judge is shown together, and what becomes of the verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import Literal, NamedTuple

from lrlhf.rewards.function import NoSiblingsError, RewardError
from lrlhf.rewards.judge.verdicts import LETTERS

REFERENCE = -1
"""Stands for the reference answer among the numbers of responses."""

Mode = Literal["absolute", "pairwise", "listwise"]
Order = tuple[int, ...]
"""Numbers of responses, in the order in which the judge is shown them."""
Scores = Mapping[Order, tuple[float, ...] | None]
"""What a verdict says of each response that was shown, from 0 to 1; None: there is no verdict."""


class Comparison(NamedTuple):
    """Responses that are judged together, in one order or in several that must not matter."""

    orders: tuple[Order, ...]

    def values(self, scores: Scores) -> dict[int, float]:
        """Return the mean of the orders for each response; none if a verdict is missing.

        With one order alone, a judge that likes what stands first would be believed.
        """
        said = [scores[order] for order in self.orders]
        if any(entry is None for entry in said):
            return {}
        by_row = [dict(zip(order, scores[order] or (), strict=True)) for order in self.orders]
        return {row: fmean(entry[row] for entry in by_row) for row in by_row[0]}

    def agreement(self, scores: Scores) -> float | None:
        """Return the share of pairs that all orders say the same of; None: nothing to compare."""
        said = [scores[order] for order in self.orders]
        if len(said) < 2 or any(entry is None for entry in said):
            return None
        by_row = [dict(zip(order, scores[order] or (), strict=True)) for order in self.orders]
        same = [
            len({_sign(entry[one] - entry[other]) for entry in by_row}) == 1
            for one, other in combinations(by_row[0], 2)
        ]
        return fmean(same)


def _sign(value: float) -> float:
    return math.copysign(1.0, value) if value else 0.0


def _both_ways(*rows: int) -> Comparison:
    return Comparison((rows, rows[::-1]))


def alone(rows: Sequence[int]) -> Iterator[Comparison]:
    """Yield each response by itself."""
    return (Comparison(((row,),)) for row in rows)


def with_reference(rows: Sequence[int]) -> Iterator[Comparison]:
    """Yield each response with the reference answer."""
    return (_both_ways(row, REFERENCE) for row in rows)


def in_pairs(rows: Sequence[int], opponents: int | None = None) -> Iterator[Comparison]:
    """Yield the pairs of a group; none of a single response.

    Args:
        rows: The group.
        opponents: How many each response meets, an even number; None: all others. The responses
            stand in a ring, and each meets its neighbours on both sides.
    """
    if opponents is None or opponents >= len(rows) - 1:
        yield from (_both_ways(*pair) for pair in combinations(rows, 2))
        return
    for step in range(1, opponents // 2 + 1):
        for place, row in enumerate(rows):
            yield _both_ways(row, rows[(place + step) % len(rows)])


def all_together(rows: Sequence[int]) -> Iterator[Comparison]:
    """Yield the group as a whole; nothing of a single response."""
    if len(rows) < 2:
        return
    if len(rows) > len(LETTERS):
        raise RewardError(
            f"mode listwise shows a judge {len(LETTERS)} responses at most, and a prompt has "
            f"{len(rows)}; take mode pairwise with opponents"
        )
    yield _both_ways(*rows)


def check_groups(groups: Sequence[Sequence[int]], mode: Mode) -> None:
    """Refuse a batch in which no response has another to be compared with.

    Where some have, the others go without a value: a sibling may have failed.

    Raises:
        NoSiblingsError: Each group has a single response.
    """
    if groups and all(len(group) < 2 for group in groups):
        raise NoSiblingsError(
            f"mode {mode} compares the responses to a prompt, and here no prompt has two: take "
            "mode absolute, or pairwise with reference_column. In an evaluation it needs several "
            "samples (model.evaluation.num_samples) at temperatures above 0; they are taken in "
            "rounds of model.num_generations, and none of the rounds may be of one"
        )


def comparisons_of(
    mode: Mode, opponents: int | None, reference_column: str | None
) -> Callable[[Sequence[int]], Iterator[Comparison]]:
    """Return what yields the comparisons of a group.

    Raises:
        ValueError: The options do not go together.
    """
    if mode != "pairwise" and (opponents is not None or reference_column is not None):
        raise ValueError("opponents and reference_column are for mode: pairwise")
    if opponents is not None and reference_column is not None:
        raise ValueError("with reference_column responses do not meet each other: no opponents")
    if opponents is not None and (opponents < 2 or opponents % 2):
        raise ValueError(f"opponents is {opponents}; it must be an even number above 0")
    if mode == "absolute":
        return alone
    if mode == "listwise":
        return all_together
    if reference_column is not None:
        return with_reference
    return partial(in_pairs, opponents=opponents)
