"""What a judge compares, the prompts it reads, and the values that its verdicts give responses.

`JudgeReward` sends these prompts to a service; `GenerativeReward` answers them in this process.
`JudgePrompts.batch` gathers responses, `JudgePrompts.questions` lists what is asked of them, and
`response_values` averages the verdicts that `JudgePrompts.read` finds in the replies.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any, Literal, NamedTuple

from lrlhf.rewards.function import (
    Completion,
    NoSiblingsError,
    RewardError,
    column_of,
    completion_text,
)
from lrlhf.rewards.judge.verdicts import (
    ABSOLUTE,
    LETTERS,
    LISTWISE,
    FormName,
    JudgeTemplate,
    choice_scores,
    prompt_text,
    read_ranking,
    read_rating,
    verdict_form,
    verdict_of,
)
from lrlhf.rewards.reward_values import shorten
from lrlhf.types import Prompt

Mode = Literal["absolute", "pairwise", "listwise"]
_REFERENCE = -1
"""Stands for the reference answer among the indices of responses."""
_TEMPLATES = {"absolute": ABSOLUTE, "listwise": LISTWISE}

Order = tuple[int, ...]
"""Indices of responses, in the order in which the judge reads them."""
Scores = Mapping[Order, tuple[float, ...] | None]
"""Verdict on the responses in each order, from 0 to 1; None: there is no verdict."""


class Comparison(NamedTuple):
    """Responses that are compared with each other, in one order or in several."""

    orders: tuple[Order, ...]

    def _by_order(self, scores: Scores) -> list[dict[int, float]] | None:
        """Return the scores by response in each order; None: a verdict is missing."""
        pairs = [(order, scores[order]) for order in self.orders]
        known = [dict(zip(order, own, strict=True)) for order, own in pairs if own is not None]
        return known if len(known) == len(pairs) else None

    def values(self, scores: Scores) -> dict[int, float]:
        """Return the mean over the orders for each response; none if a verdict is missing.

        A single order would reward what a judge with a position bias reads first.
        """
        by_order = self._by_order(scores)
        return {row: fmean(own[row] for own in by_order) for row in by_order[0]} if by_order else {}

    def agreement(self, scores: Scores) -> float | None:
        """Return the share of pairs that all orders rank alike; None: nothing to compare."""
        by_order = self._by_order(scores)
        if by_order is None or len(by_order) < 2:
            return None
        return fmean(
            len({math.copysign(1.0, d) if (d := own[a] - own[b]) else 0.0 for own in by_order}) == 1
            for a, b in combinations(by_order[0], 2)
        )


class JudgeRequest(NamedTuple):
    """One prompt of the judge, and the comparison that its verdict belongs to."""

    comparison: Comparison
    order: Order
    sample: int

    @property
    def about(self) -> int:
        """The index of a response to the prompt in question."""
        return next(row for row in self.order if row != _REFERENCE)


@dataclass(frozen=True)
class Reply:
    """A reply of the judge, and its tokens."""

    text: str
    finished: bool
    """Whether it ended by itself."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class Verdict:
    """The last reply to a question, and its verdict."""

    scores: tuple[float, ...] | None
    reply: Reply | None
    """None: there is none."""


@dataclass(frozen=True)
class Batch:
    """Responses to be compared, one entry per response in each field."""

    prompts: Sequence[Prompt]
    completions: Sequence[str]
    shown: Sequence[Sequence[Any] | None]
    """Stands for the media of each prompt, in a form that JSON has."""
    columns: Mapping[str, Sequence[Any]]
    references: Sequence[str | None] | None
    """Answers to compare with; None in them: there is none."""

    def groups(self) -> list[list[int]]:
        """Return the indices of the responses to each prompt."""
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for row in range(len(self.completions)):
            columns = {name: values[row] for name, values in self.columns.items()}
            reference = self.references and self.references[row]
            same = (self.prompts[row], self.shown[row], columns, reference)
            groups[json.dumps(same, default=str, sort_keys=True)].append(row)
        return [*groups.values()]

    def text(self, row: int, of: int) -> str:
        """Return a response, or the reference answer to the prompt of response ``of``."""
        if row == _REFERENCE and self.references is not None:
            return self.references[of] or ""
        return self.completions[row]


class JudgePrompts:
    """Writes the prompts of a judge and reads its replies; options as in `JudgeReward`.

    Raises:
        ValueError: The template is none, or the options do not go together.
    """

    def __init__(
        self,
        mode: Mode,
        form: FormName,
        *,
        template: str | None,
        rubric: str | None,
        opponents: int | None,
        reference_column: str | None,
        samples: int,
        scale: tuple[float, float] = (1.0, 10.0),
    ) -> None:
        self._form = verdict_form(form)
        if form != "line" and mode != "pairwise":
            raise ValueError(f"form {form} is for mode: pairwise")
        if mode != "pairwise" and (opponents is not None or reference_column is not None):
            raise ValueError("opponents and reference_column are for mode: pairwise")
        if opponents is not None and reference_column is not None:
            raise ValueError("with reference_column responses do not meet each other: no opponents")
        if opponents is not None and (opponents < 2 or opponents % 2):
            raise ValueError(f"opponents is {opponents}; it must be an even number above 0")
        self._low, self._high = scale
        if not self._low < self._high:
            raise ValueError(f"scale is {[*scale]}; give the worst rating, then the best")
        self._template = JudgeTemplate(template or _TEMPLATES.get(mode, self._form.template))
        self._mode, self._samples, self._rubric = mode, samples, rubric
        self._opponents, self._reference = opponents, reference_column
        self.compares_responses = mode != "absolute" and reference_column is None
        """Whether responses are compared with others to the same prompt."""

    def batch(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        shown: Sequence[Sequence[Any] | None],
        columns: Mapping[str, Any],
        clean: Callable[[str], str] = str,
    ) -> Batch:
        """Gather what the prompts are made of.

        Args:
            prompts: One per response, as all that follows.
            completions: The responses.
            shown: See `Batch`.
            columns: Of the data.
            clean: Removes from responses and reference answers what the judge must not read.

        Raises:
            RewardError: A column is missing, or a reference answer is no text.
        """
        references = None
        if (name := self._reference) is not None:
            texts = (
                clean(_reference_text(entry, name))
                for entry in column_of(columns, name, setting="reference_column")
            )
            references = [text if text.strip() else None for text in texts]
        return Batch(
            prompts,
            [clean(completion_text(completion)) for completion in completions],
            shown,
            {name: column_of(columns, name, setting="template") for name in self._template.columns},
            references,
        )

    def questions(self, batch: Batch) -> list[JudgeRequest]:
        """Return all questions about a batch.

        Responses without a sibling, as others may have failed, have none, unless all are so.

        Raises:
            NoSiblingsError: No prompt has enough responses to compare.
            RewardError: One has too many.
        """
        groups = batch.groups()
        if self.compares_responses and groups and all(len(group) < 2 for group in groups):
            raise NoSiblingsError(
                f"mode {self._mode} compares the responses to a prompt, and here no prompt has "
                "two: take mode absolute, or pairwise with reference_column. In an evaluation it "
                "needs several samples (model.evaluation.num_samples) at temperatures above 0; "
                "they are taken in rounds of model.num_generations, and none of the rounds may be "
                "of one"
            )
        return [
            JudgeRequest(comparison, order, sample)
            for group in groups
            if batch.references is None or batch.references[group[0]] is not None
            for comparison in self._comparisons(group)
            for order in comparison.orders
            for sample in range(self._samples)
        ]

    def _comparisons(self, rows: Sequence[int]) -> Iterator[Comparison]:
        pairs: Iterable[tuple[int, ...]]
        if self._mode == "absolute":
            yield from (Comparison(((row,),)) for row in rows)
            return
        if self._mode == "listwise":
            if len(rows) > len(LETTERS):
                raise RewardError(
                    f"mode listwise shows a judge {len(LETTERS)} responses at most, and a prompt "
                    f"has {len(rows)}; take mode pairwise with opponents"
                )
            pairs = [tuple(rows)] if len(rows) > 1 else []
        elif self._reference is not None:
            pairs = [(row, _REFERENCE) for row in rows]
        elif self._opponents is None or self._opponents >= len(rows) - 1:
            pairs = combinations(rows, 2)
        else:  # in a ring, each with its neighbours on both sides
            pairs = [
                (row, rows[(index + step) % len(rows)])
                for step in range(1, self._opponents // 2 + 1)
                for index, row in enumerate(rows)
            ]
        yield from (Comparison((order, order[::-1])) for order in pairs)

    def text(self, batch: Batch, question: JudgeRequest) -> str:
        own = question.about
        return self._template.render(
            prompt=prompt_text(batch.prompts[own]),
            responses=[batch.text(row, own) for row in question.order],
            rubric=self._rubric,
            shown="Response",
            low=f"{self._low:g}",
            high=f"{self._high:g}",
            **{name: values[own] for name, values in batch.columns.items()},
        )

    def read(self, question: JudgeRequest, reply: Reply | None) -> Verdict:
        """Return the verdict of a reply; one that was cut off has none."""
        if reply is None or not reply.finished:
            return Verdict(None, reply)
        if self._mode == "pairwise":
            return Verdict(choice_scores(self._form.read(reply.text)), reply)
        verdict = verdict_of(reply.text)
        if verdict is None:
            return Verdict(None, reply)
        if self._mode == "absolute":
            return Verdict(read_rating(verdict, self._low, self._high), reply)
        return Verdict(read_ranking(verdict, len(question.order)), reply)


def _reference_text(reference: Any, column: str) -> str:
    """Return a reference answer as text; of a chat, the assistant's turns; empty: none."""
    if reference is None or isinstance(reference, str):
        return reference or ""
    if isinstance(reference, Sequence) and all(isinstance(turn, Mapping) for turn in reference):
        return completion_text(reference)
    raise RewardError(
        f"reference_column: an entry of column {column!r} is {shorten(reference)} "
        f"({type(reference).__name__}); give a text, or the turns of a chat"
    )


def judge_columns(options: Mapping[str, Any]) -> Iterable[str]:
    """Return the data columns that a judge with these options needs."""
    # built-in templates need none
    template = options.get("template") or ABSOLUTE
    reference = options.get("reference_column")
    return [*JudgeTemplate(template).columns, *([reference] if reference else [])]


def _scores_by_comparison(
    questions: Sequence[JudgeRequest], verdicts: Mapping[JudgeRequest, Verdict]
) -> Iterator[tuple[Comparison, Scores]]:
    """Yield each comparison with the scores of its orders, means over samples with a verdict."""
    sampled: dict[Comparison, dict[Order, list[tuple[float, ...]]]] = {}
    for question in questions:
        samples = sampled.setdefault(question.comparison, {}).setdefault(question.order, [])
        if (scores := verdicts[question].scores) is not None:
            samples.append(scores)
    for comparison, orders in sampled.items():
        yield (
            comparison,
            {
                order: tuple(map(fmean, zip(*samples, strict=True))) or None
                for order, samples in orders.items()
            },
        )


def response_values(
    questions: Sequence[JudgeRequest], verdicts: Mapping[JudgeRequest, Verdict], count: int
) -> list[float | None]:
    """Return the mean over its comparisons for each response."""
    collected: defaultdict[int, list[float]] = defaultdict(list)
    for comparison, scores in _scores_by_comparison(questions, verdicts):
        for row, value in comparison.values(scores).items():
            collected[row].append(value)
    return [fmean(collected[row]) if collected[row] else None for row in range(count)]


def reply_texts(
    questions: Sequence[JudgeRequest], verdicts: Mapping[JudgeRequest, Verdict], count: int
) -> list[list[str]]:
    """Return the replies about each response; of comparisons, with the letter that it had."""
    texts: list[list[str]] = [[] for _ in range(count)]
    for question in questions:
        reply = verdicts[question].reply
        for letter, row in zip(LETTERS, question.order, strict=False):
            if row != _REFERENCE and reply is not None:
                prefix = f"as {letter}: " if len(question.order) > 1 else ""
                texts[row].append(f"{prefix}{reply.text}")
    return texts


def verdict_metrics(
    questions: Sequence[JudgeRequest], verdicts: Mapping[JudgeRequest, Verdict]
) -> dict[str, float]:
    """Return the quality of a judge's verdicts, as far as there are any.

    ``malformed_fraction`` is the share of replies without a verdict, ``order_agreement`` the share
    of comparisons that all orders rank alike.
    """
    metrics = {}
    if replied := [verdict for verdict in verdicts.values() if verdict.reply is not None]:
        metrics["malformed_fraction"] = fmean(verdict.scores is None for verdict in replied)
    agreements = [
        share
        for comparison, scores in _scores_by_comparison(questions, verdicts)
        if (share := comparison.agreement(scores)) is not None
    ]
    if agreements:
        metrics["order_agreement"] = fmean(agreements)
    return metrics
