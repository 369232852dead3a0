"""Rewards that compare or match text."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lrlhf.rewards.function import (
    Completion,
    RewardFunction,
    before_open_thought,
    column_of,
    completion_text,
    outside_thoughts,
)
from lrlhf.rewards.functions.one_by_one import TextPattern, judged

_EDGES = " \t\n\r.,;:!?\"'`"


class ExactMatch(RewardFunction):
    """1 where the response is the answer, else 0; no value where the row has no answer.

    Thoughts up to ``</think>`` are no part of the answer; a thought that is never closed has none.

    Args:
        answer_column: Data column with the answer, or with a list of accepted answers.
        normalize: Ignore case, runs of white space, and punctuation and quotes at both ends.
        extract: Regular expression; what its last match in the response holds (its first group,
            if it has one) is compared instead of the whole response. Without a match: 0.
    """

    @classmethod
    def columns_read(cls, options: Mapping[str, Any]) -> Iterable[str]:
        return (str(options.get("answer_column", "answer")),)

    def __init__(
        self, answer_column: str = "answer", normalize: bool = True, extract: str | None = None
    ) -> None:
        self.answer_column = answer_column
        self._normalize = normalize
        self._extract = None if extract is None else TextPattern(extract, "extract")

    def __call__(self, *, completions: Sequence[Completion], **columns: Any) -> list[float | None]:
        answers = column_of(columns, self.answer_column, setting="answer_column")
        return judged(
            lambda row, share: self._score(completion_text(completions[row]), answers[row], share),
            len(completions),
        )

    def answer_of(self, text: str) -> str | None:
        """Return what is compared, in the form in which it is; for majority votes."""
        found = self._found(text)
        return None if found is None else self._form(found)

    def _found(self, text: str, share: float = 1.0) -> str | None:
        if self._extract is None:
            return outside_thoughts(text)
        return self._extract.last(before_open_thought(text), share=share)

    def _score(self, text: str, answer: object, share: float) -> float | None:
        if answer is None:
            return None
        accepted = answer if isinstance(answer, list | tuple) else [answer]
        found = self._found(text, share)
        if found is None:
            return 0.0
        return float(self._form(found) in {self._form(str(entry)) for entry in accepted})

    def _form(self, text: str) -> str:
        if not self._normalize:
            return text
        text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
        return text.strip(_EDGES)


class RegexFormat(RewardFunction):
    """1 where the response has the wanted form, else 0.

    Args:
        pattern: Regular expression; ``.`` matches line breaks too.
        full_match: The whole response must match, white space at its ends aside; otherwise the
            pattern may match anywhere.
        prefix: Put before the response, for what the chat template has said already, such as
            ``<think>``.
    """

    def __init__(self, pattern: str, full_match: bool = True, prefix: str = "") -> None:
        self._pattern = TextPattern(pattern, "pattern")
        self._full_match = full_match
        self._prefix = prefix

    def __call__(self, *, completions: Sequence[Completion], **columns: Any) -> list[float | None]:
        return judged(
            lambda row, share: self._score(self._prefix + completion_text(completions[row]), share),
            len(completions),
        )

    def _score(self, text: str, share: float) -> float:
        return float(self._pattern.matches(text.strip(), whole=self._full_match, share=share))
