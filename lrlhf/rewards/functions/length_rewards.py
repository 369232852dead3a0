"""Rewards that shape how long and how varied responses are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lrlhf.rewards.function import Completion, RewardFunction, completion_text

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
