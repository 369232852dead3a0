"""From responses to what a judge is asked, and from its replies to verdicts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lrlhf.rewards.function import Completion, RewardError, column_of, completion_text
from lrlhf.rewards.judge.chat_endpoint import Reply
from lrlhf.rewards.judge.comparisons import REFERENCE, Mode, check_groups, comparisons_of
from lrlhf.rewards.judge.forms import FormName, verdict_form
from lrlhf.rewards.judge.questions import Question, Verdict
from lrlhf.rewards.judge.templates import ABSOLUTE, LISTWISE, JudgeTemplate, prompt_text
from lrlhf.rewards.judge.verdicts import choice_scores, read_ranking, read_rating, verdict_of
from lrlhf.rewards.reward_values import shorten
from lrlhf.types import Prompt

_TEMPLATES = {"absolute": ABSOLUTE, "listwise": LISTWISE}


@dataclass(frozen=True)
class Batch:
    """What is to be judged, one entry per response in each."""

    prompts: Sequence[Prompt]
    completions: Sequence[str]
    shown: Sequence[Sequence[Any] | None]
    """Stands for what each prompt shows, as JSON can say it."""
    columns: Mapping[str, Sequence[Any]]
    references: Sequence[str | None] | None
    """Answers to compare with; None in them: there is none."""

    def groups(self) -> list[list[int]]:
        """Return the numbers of the responses that have the same to answer."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for row in range(len(self.completions)):
            columns = {name: values[row] for name, values in self.columns.items()}
            reference = self.references and self.references[row]
            same = (self.prompts[row], self.shown[row], columns, reference)
            found[json.dumps(same, default=str, sort_keys=True)].append(row)
        return [*found.values()]

    def is_comparable(self, group: Sequence[int]) -> bool:
        """Whether there is a reference answer, where there is to be one."""
        return self.references is None or self.references[group[0]] is not None

    def text(self, row: int, of: int) -> str:
        """Return a response, or the reference answer to the prompt of another."""
        if row == REFERENCE and self.references is not None:
            return self.references[of] or ""
        return self.completions[row]


class Asker:
    """Writes the questions to a judge and reads its replies; options as in `JudgeReward`.

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
        self._mode, self._samples = mode, samples
        self._template = JudgeTemplate(template or _TEMPLATES.get(mode, self._form.template))
        self._rubric, self._reference = rubric, reference_column
        self._compare = comparisons_of(mode, opponents, reference_column)
        self.compares_responses = mode != "absolute" and reference_column is None
        """Whether responses are shown with others to the same prompt."""
        self._low, self._high = scale
        if not self._low < self._high:
            raise ValueError(f"scale is {[*scale]}; give the worst rating, then the best")

    def batch(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        shown: Sequence[Sequence[Any] | None],
        columns: Mapping[str, Any],
        clean: Callable[[str], str] = str,
    ) -> Batch:
        """Gather what the questions are made of.

        Args:
            prompts: One per response, as all that follows.
            completions: The responses.
            shown: See `Batch`.
            columns: Of the data.
            clean: Takes out of responses and reference answers what the judge must not read.

        Raises:
            RewardError: A column is missing, or a reference answer is no text.
        """
        return Batch(
            prompts,
            [clean(completion_text(completion)) for completion in completions],
            shown,
            {name: column_of(columns, name, setting="template") for name in self._template.columns},
            self._references(columns, clean),
        )

    def _references(
        self, columns: Mapping[str, Any], clean: Callable[[str], str]
    ) -> list[str | None] | None:
        if (name := self._reference) is None:
            return None
        given = column_of(columns, name, setting="reference_column")
        texts = (clean(_reference_text(one, name)) for one in given)
        return [text if text.strip() else None for text in texts]

    def questions(self, batch: Batch) -> list[Question]:
        """Return all that is asked of a batch.

        Raises:
            RewardError: No group has enough responses to compare, or one has too many.
        """
        groups = batch.groups()
        if self.compares_responses:
            check_groups(groups, self._mode)
        return [
            Question(comparison, order, sample)
            for group in groups
            if batch.is_comparable(group)
            for comparison in self._compare(group)
            for order in comparison.orders
            for sample in range(self._samples)
        ]

    def text(self, batch: Batch, question: Question) -> str:
        """Return the text of a question."""
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

    def read(self, question: Question, reply: Reply | None) -> Verdict:
        """Return what a reply says; one that was cut off says nothing."""
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
    """Return a reference answer as text; of a chat, what the assistant says; empty: none."""
    if reference is None or isinstance(reference, str):
        return reference or ""
    if isinstance(reference, Sequence) and all(isinstance(turn, Mapping) for turn in reference):
        return completion_text(reference)
    raise RewardError(
        f"reference_column: an entry of column {column!r} is {shorten(reference)} "
        f"({type(reference).__name__}); give a text, or the turns of a chat"
    )


def columns_asked(options: Mapping[str, Any]) -> Iterable[str]:
    """Return the columns that a judge with these options needs."""
    # built-in templates need none
    template = options.get("template") or ABSOLUTE
    reference = options.get("reference_column")
    return [*JudgeTemplate(template).columns, *([reference] if reference else [])]
