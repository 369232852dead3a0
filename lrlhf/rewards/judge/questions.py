"""Questions to a judge, and what the replies say of each response."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from lrlhf.rewards.judge.chat_endpoint import Reply
from lrlhf.rewards.judge.comparisons import REFERENCE, Comparison, Order, Scores
from lrlhf.rewards.judge.verdicts import LETTERS


class Question(NamedTuple):
    """What the judge is asked once, and where the answer belongs."""

    comparison: Comparison
    order: Order
    sample: int

    @property
    def about(self) -> int:
        """The number of a response to the prompt in question."""
        return next(row for row in self.order if row != REFERENCE)


@dataclass
class Verdict:
    """The last reply to a question, and what it says."""

    scores: tuple[float, ...] | None
    reply: Reply | None
    """None: there is none."""


def scores_by_comparison(
    questions: Sequence[Question], found: Mapping[Question, Verdict]
) -> Iterator[tuple[Comparison, Scores]]:
    """Yield each comparison with what its orders say, the mean of those samples that say it."""
    said: dict[Comparison, dict[Order, list[tuple[float, ...]]]] = {}
    for question in questions:
        orders = said.setdefault(question.comparison, {})
        samples = orders.setdefault(question.order, [])
        if (scores := found[question].scores) is not None:
            samples.append(scores)
    for comparison, orders in said.items():
        yield (
            comparison,
            {
                order: tuple(map(fmean, zip(*samples, strict=True))) or None
                for order, samples in orders.items()
            },
        )


def values_of(
    questions: Sequence[Question], found: Mapping[Question, Verdict], count: int
) -> list[float | None]:
    """Return the mean over its comparisons for each response."""
    collected: defaultdict[int, list[float]] = defaultdict(list)
    for comparison, scores in scores_by_comparison(questions, found):
        for row, value in comparison.values(scores).items():
            collected[row].append(value)
    return [fmean(collected[row]) if collected[row] else None for row in range(count)]


def notes_of(
    questions: Sequence[Question], found: Mapping[Question, Verdict], count: int
) -> list[list[str]]:
    """Return what the judge wrote of each response; of comparisons, with the letter that it had."""
    notes: list[list[str]] = [[] for _ in range(count)]
    for question in questions:
        reply = found[question].reply
        for letter, row in zip(LETTERS, question.order, strict=False):
            if row != REFERENCE and reply is not None:
                named = f"as {letter}: " if len(question.order) > 1 else ""
                notes[row].append(f"{named}{reply.text}")
    return notes


def qualities(questions: Sequence[Question], found: Mapping[Question, Verdict]) -> dict[str, float]:
    """Return how good a judge's verdicts are, as far as there is something to tell.

    ``malformed_fraction`` is the share of replies without a verdict, ``order_agreement`` the share
    of comparisons that all orders say the same of.
    """
    told = {}
    if replied := [verdict for verdict in found.values() if verdict.reply is not None]:
        told["malformed_fraction"] = fmean(verdict.scores is None for verdict in replied)
    agreed = [
        share
        for comparison, scores in scores_by_comparison(questions, found)
        if (share := comparison.agreement(scores)) is not None
    ]
    if agreed:
        told["order_agreement"] = fmean(agreed)
    return told
