"""Rewards that compare or match text."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from lrlhf.rewards.function import Completion, RewardFunction, column_of, completion_text
from lrlhf.rewards.functions.one_by_one import TextPattern, extracted, scores_one_by_one

_EDGES = " \t\n\r.,;:!?\"'`"


class ExactMatch(RewardFunction):
    """1 where the response is the answer, else 0; no value where the row has no answer.

    Thoughts up to ``</think>`` are no part of the answer; a thought that is never closed has none.

    Args:
        answer_column: Data column with the answer, or with a list of accepted answers.
        normalize: Ignore case, runs of white space, and punctuation and quotes at both ends.
        extract: Regular expression; its last match in the response (or the first group of that,
            if it has one) is compared instead of the complete response. Without a match: 0.
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

        def score(row: int, share: float) -> float | None:
            if (answer := answers[row]) is None:
                return None
            accepted = answer if isinstance(answer, list | tuple) else [answer]
            text = extracted(completion_text(completions[row]), self._extract, share)
            if text is None:
                return 0.0
            return float(
                self._normalized(text) in {self._normalized(str(each)) for each in accepted}
            )

        return scores_one_by_one(score, len(completions))

    def answer_of(self, text: str) -> str | None:
        """Return the text that is compared; for majority votes."""
        answer = extracted(text, self._extract)
        return None if answer is None else self._normalized(answer)

    def _normalized(self, text: str) -> str:
        if not self._normalize:
            return text
        text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
        return text.strip(_EDGES)


class RegexFormat(RewardFunction):
    """1 where the response matches a regular expression, else 0.

    Args:
        pattern: Regular expression; ``.`` matches line breaks too.
        full_match: The complete response must match, white space at its ends aside; otherwise the
            pattern may match anywhere.
        prefix: Put before the response, for what the chat template has written already, such as
            ``<think>``.
    """

    def __init__(self, pattern: str, full_match: bool = True, prefix: str = "") -> None:
        self._pattern = TextPattern(pattern, "pattern")
        self._full_match = full_match
        self._prefix = prefix

    def __call__(self, *, completions: Sequence[Completion], **columns: Any) -> list[float | None]:
        def score(row: int, share: float) -> float:
            text = (self._prefix + completion_text(completions[row])).strip()
            return float(self._pattern.matches(text, full=self._full_match, share=share))

        return scores_one_by_one(score, len(completions))


Unit = Literal["tokens", "words", "characters"]


class LengthPenalty(RewardFunction):
    """Penalty for responses that are too long or too short.

        -min(max_penalty, slope · distance of the length from the accepted range)

    Args:
        target: Length that costs nothing.
        slope: Penalty per unit of length.
        side: ``over``: only longer responses cost; ``under``: only shorter ones; ``both``.
        unit: Of the length: ``tokens`` (the end-of-sequence token included), ``words`` or
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
        self._target, self._slope, self._side = target, slope, side
        self._unit, self._max_penalty = unit, max_penalty

    def __call__(
        self,
        *,
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]],
        **columns: Any,
    ) -> list[float]:
        penalties = []
        for units in _units(completions, completion_ids, self._unit):
            excess = len(units) - self._target
            distances = {"both": abs(excess), "over": max(0, excess), "under": max(0, -excess)}
            penalties.append(-min(self._max_penalty, self._slope * distances[self._side]))
        return penalties


class OverlongPenalty(RewardFunction):
    """Overlong reward shaping, DAPO's soft punishment: grows as a response nears the length limit.

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
        parts = ((len(ids) - self._free) / self._buffer for ids in completion_ids)
        return [-self._factor * min(1.0, max(0.0, part)) for part in parts]


class RepetitionPenalty(RewardFunction):
    """Penalty for the repeated part of a response.

        -max_penalty · (1 - different n-grams / n-grams)

    Args:
        ngram: Length of the repeated pieces.
        unit: Made of ``tokens``, ``words`` or ``characters``.
        max_penalty: Limit of the penalty for endless repetition.
    """

    def __init__(self, ngram: int = 4, unit: Unit = "words", max_penalty: float = 1.0) -> None:
        _at_least("ngram", ngram, 1)
        _at_least("max_penalty", max_penalty, 0)
        self._ngram, self._unit, self._max_penalty = ngram, unit, max_penalty

    def __call__(
        self,
        *,
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]],
        **columns: Any,
    ) -> list[float]:
        penalties = []
        for units in _units(completions, completion_ids, self._unit):
            count = len(units) - self._ngram + 1
            ngrams = {tuple(units[start : start + self._ngram]) for start in range(count)}
            penalties.append(-self._max_penalty * (1 - len(ngrams) / count if count > 0 else 0.0))
        return penalties


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
