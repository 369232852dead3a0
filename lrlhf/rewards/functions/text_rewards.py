"""Rewards that compare or match text."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

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


Unit = Literal["tokens", "words", "characters"]


class LengthPenalty(RewardFunction):
    """Penalty for responses that are too long or too short.

        -min(max_penalty, slope · distance of the length from the accepted range)

    Args:
        target: Length that costs nothing.
        slope: Penalty per unit of length.
        side: ``over``: only longer responses cost; ``under``: only shorter ones; ``both``.
        unit: What is counted: ``tokens`` (the end-of-sequence token included), ``words`` or
            ``characters``.
        max_penalty: Nothing costs more.
    """

    def __init__(
        self,
        target: int,
        slope: float = 0.01,
        side: Literal["over", "under", "both"] = "over",
        unit: Unit = "tokens",
        max_penalty: float = 1.0,
    ) -> None:
        _at_least("target", target, 0)
        _at_least("slope", slope, 0)
        _at_least("max_penalty", max_penalty, 0)
        self._target = target
        self._slope = slope
        self._side = side
        self._unit = unit
        self._max_penalty = max_penalty

    def __call__(
        self,
        *,
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]],
        **columns: Any,
    ) -> list[float]:
        return [
            -min(self._max_penalty, self._slope * self._distance(len(units)))
            for units in _units(completions, completion_ids, self._unit)
        ]

    def _distance(self, length: int) -> int:
        excess = length - self._target
        if self._side == "both":
            return abs(excess)
        return max(0, excess if self._side == "over" else -excess)


class OverlongPenalty(RewardFunction):
    """Penalty that grows as a response approaches the length limit.

        0                                            up to max_new_tokens - buffer tokens
        -factor · (length - max_new_tokens + buffer) / buffer     from there on, at most factor

    Args:
        max_new_tokens: The sampling's limit.
        buffer: Tokens before the limit over which the penalty grows.
        factor: Penalty at the limit.

    Reference:
        DAPO, eq. 13, https://arxiv.org/abs/2503.14476 (factor 1)
    """

    def __init__(self, max_new_tokens: int, buffer: int, factor: float = 1.0) -> None:
        _at_least("max_new_tokens", max_new_tokens, 1)
        _at_least("factor", factor, 0)
        if not 0 < buffer <= max_new_tokens:
            raise ValueError(
                f"buffer is {buffer}; it must lie between 1 and max_new_tokens ({max_new_tokens})"
            )
        self._free = max_new_tokens - buffer
        self._buffer = buffer
        self._factor = factor

    def __call__(self, *, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        return [-self._factor * self._part(len(ids)) for ids in completion_ids]

    def _part(self, length: int) -> float:
        return min(1.0, max(0.0, (length - self._free) / self._buffer))


class RepetitionPenalty(RewardFunction):
    """Penalty for the repeated part of a response.

        -max_penalty · (1 - different n-grams / n-grams)

    Args:
        ngram: Length of the repeated pieces.
        unit: Made of ``tokens``, ``words`` or ``characters``.
        max_penalty: Penalty that endless repetition comes close to.
    """

    def __init__(self, ngram: int = 4, unit: Unit = "words", max_penalty: float = 1.0) -> None:
        _at_least("ngram", ngram, 1)
        _at_least("max_penalty", max_penalty, 0)
        self._ngram = ngram
        self._unit = unit
        self._max_penalty = max_penalty

    def __call__(
        self,
        *,
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]],
        **columns: Any,
    ) -> list[float]:
        return [
            -self._max_penalty * self._repeated(units)
            for units in _units(completions, completion_ids, self._unit)
        ]

    def _repeated(self, units: Sequence[Any]) -> float:
        count = len(units) - self._ngram + 1
        if count < 1:
            return 0.0
        pieces = {tuple(units[start : start + self._ngram]) for start in range(count)}
        return 1 - len(pieces) / count


def _units(
    completions: Sequence[Completion], completion_ids: Sequence[Sequence[int]], unit: Unit
) -> list[Sequence[Any]]:
    if unit == "tokens":
        return list(completion_ids)
    texts = [completion_text(completion) for completion in completions]
    if unit == "characters":
        return list(texts)
    return [text.casefold().split() for text in texts]


def _at_least(option: str, value: float, smallest: float) -> None:
    if not value >= smallest:
        raise ValueError(f"{option} is {value}; it must be {smallest} or more")
