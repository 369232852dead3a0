"""Rewards that need no model: right answers, formats, lengths."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lrlhf.rewards.completions import Completion, completion_text
from lrlhf.rewards.numbers import last_boxed, numbers_in, same_answer
from lrlhf.rewards.result import RewardError


class ExactMatch:
    """1 where the completion is the answer, else 0.

    Args:
        answer_column: Column that holds the answer.
        normalize: Ignore case, surrounding blanks, and a final full stop.
        extract: Regular expression; its first group (or all of it) in the completion is what is
            compared. A completion without a match scores 0.
    """

    def __init__(
        self, answer_column: str = "answer", normalize: bool = True, extract: str | None = None
    ) -> None:
        self.answer_column = answer_column
        self.normalize = normalize
        self.extract = _compiled(extract, "ExactMatch.extract")

    def __call__(self, completions: Sequence[Completion], **columns: Any) -> list[float]:
        answers = _column(columns, self.answer_column, "ExactMatch")
        return [
            float(self._matches(completion_text(completion), str(answer)))
            for completion, answer in zip(completions, answers, strict=True)
        ]

    def _matches(self, text: str, answer: str) -> bool:
        if self.extract is not None:
            found = self.extract.search(text)
            if found is None:
                return False
            text = found.group((found.lastindex and 1) or 0)
        if self.normalize:
            text, answer = _plain(text), _plain(answer)
        return text == answer


class NumericAnswer:
    r"""1 where a number in the completion equals the answer's, else 0.

    Understands signs, thousands separators, currency and percent signs, decimals and fractions;
    an answer may end in GSM8K's ``#### 72``.

    Args:
        answer_column: Column that holds the answer.
        which: Number of the completion that counts: "last", "first", "boxed" (the last
            ``\boxed{…}``), or a regular expression whose first group holds it.
        tolerance: Largest difference that still is equal, relative to the answer's size above 1.
        math_verify: Whether what two numbers cannot decide is given to the math-verify package
            (roots, symbols): "auto" where it is installed, "always", or "never".
    """

    def __init__(
        self,
        answer_column: str = "answer",
        which: str = "last",
        tolerance: float = 1e-6,
        math_verify: Literal["auto", "always", "never"] = "auto",
    ) -> None:
        self.answer_column = answer_column
        self.which = which
        self.pattern = (
            None if which in ("last", "first", "boxed") else _compiled(which, "NumericAnswer.which")
        )
        self.tolerance = tolerance
        self.math_verify = math_verify

    def __call__(self, completions: Sequence[Completion], **columns: Any) -> list[float | None]:
        answers = _column(columns, self.answer_column, "NumericAnswer")
        return [
            self._score(completion_text(completion), str(answer))
            for completion, answer in zip(completions, answers, strict=True)
        ]

    def _score(self, text: str, answer: str) -> float | None:
        wanted = answer.rsplit("####", 1)[-1].strip()
        if not wanted:
            return None  # a row without an answer cannot be scored
        given = self._given(text)
        if given is None:
            return 0.0
        return float(
            same_answer(given, wanted, tolerance=self.tolerance, math_verify=self.math_verify)
        )

    def _given(self, text: str) -> str | None:
        if self.which == "boxed":
            return last_boxed(text)
        if self.pattern is not None:
            found = self.pattern.search(text)
            return None if found is None else found.group((found.lastindex and 1) or 0)
        numbers = numbers_in(text)
        if not numbers:
            return None
        return numbers[0] if self.which == "first" else numbers[-1]


class RegexFormat:
    """A reward for completions of the right form.

    Args:
        pattern: Regular expression; a dot matches line ends too.
        full_match: The whole completion must match, not just a part of it.
        match_score: Score where it matches.
        mismatch_score: Score where it does not.
    """

    def __init__(
        self,
        pattern: str,
        full_match: bool = True,
        match_score: float = 1.0,
        mismatch_score: float = 0.0,
    ) -> None:
        compiled = _compiled(pattern, "RegexFormat.pattern", flags=re.DOTALL)
        assert compiled is not None
        self.pattern = compiled
        self.full_match = full_match
        self.match_score = match_score
        self.mismatch_score = mismatch_score

    def __call__(self, completions: Sequence[Completion]) -> list[float]:
        find = self.pattern.fullmatch if self.full_match else self.pattern.search
        return [
            self.match_score if find(completion_text(completion)) else self.mismatch_score
            for completion in completions
        ]


class LengthShaping:
    """Penalises responses for tokens away from a target length.

    ``-slope · max(0, |length - target| - tolerance)``, not below ``-limit``.

    Args:
        target: Tokens of a response that costs nothing.
        tolerance: Tokens away from the target that still cost nothing.
        slope: Penalty per token.
        limit: Largest penalty.
    """

    def __init__(
        self, target: int, tolerance: int = 0, slope: float = 0.01, limit: float = 1.0
    ) -> None:
        if target < 0 or tolerance < 0 or slope < 0 or limit < 0:
            raise RewardError("LengthShaping: target, tolerance, slope and limit must be 0 or more")
        self.target = target
        self.tolerance = tolerance
        self.slope = slope
        self.limit = limit

    def __call__(self, completion_ids: Sequence[Sequence[int]]) -> list[float]:
        return [self._penalty(len(ids)) for ids in completion_ids]

    def _penalty(self, length: int) -> float:
        excess = max(0, abs(length - self.target) - self.tolerance)
        return -min(self.limit, self.slope * excess)


class OverlongPenalty:
    """Soft penalty for responses that near the length limit.

    0 up to ``max_new_tokens - buffer``, then a straight line to ``-factor`` at the limit.

    Args:
        max_new_tokens: The sampling's length limit.
        buffer: Tokens before the limit in which the penalty grows.
        factor: Penalty at the limit.

    Reference:
        Yu et al. 2025 (DAPO), eq. 13, https://arxiv.org/abs/2503.14476
    """

    def __init__(self, max_new_tokens: int, buffer: int, factor: float = 1.0) -> None:
        if not 0 < buffer <= max_new_tokens:
            raise RewardError(
                f"OverlongPenalty.buffer is {buffer}; it must lie between 1 and max_new_tokens "
                f"({max_new_tokens})"
            )
        self.max_new_tokens = max_new_tokens
        self.buffer = buffer
        self.factor = factor

    def __call__(self, completion_ids: Sequence[Sequence[int]]) -> list[float]:
        start = self.max_new_tokens - self.buffer
        return [min(0.0, -(len(ids) - start) / self.buffer * self.factor) for ids in completion_ids]


class RepetitionPenalty:
    """Penalises repeated n-grams of tokens: ``-factor`` times the share that is not the first.

    Args:
        ngram: Tokens of one n-gram.
        factor: Penalty of a response that only repeats itself.
    """

    def __init__(self, ngram: int = 3, factor: float = 1.0) -> None:
        if ngram < 1:
            raise RewardError(f"RepetitionPenalty.ngram is {ngram}; it must be 1 or more")
        self.ngram = ngram
        self.factor = factor

    def __call__(self, completion_ids: Sequence[Sequence[int]]) -> list[float]:
        return [-self.factor * self._repeated(ids) for ids in completion_ids]

    def _repeated(self, ids: Sequence[int]) -> float:
        grams = [tuple(ids[i : i + self.ngram]) for i in range(len(ids) - self.ngram + 1)]
        return 1 - len(set(grams)) / len(grams) if grams else 0.0


class ReasoningGymScore:
    """The score of a reasoning_gym task's own checker, for rows of `ReasoningGym`.

    Args:
        strict: Count only a full score; off, the task's partial credit counts.
        extract: Regular expression; its first group (or all of it) in the completion is the
            answer. A completion without a match scores 0.
    """

    def __init__(self, strict: bool = False, extract: str | None = None) -> None:
        self.strict = strict
        self.extract = _compiled(extract, "ReasoningGymScore.extract")
        self._scorers: dict[str, Any] = {}

    def __call__(
        self,
        completions: Sequence[Completion],
        question: Sequence[str],
        answer: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> list[float]:
        scores = []
        for row, completion in enumerate(completions):
            entry = {
                "question": question[row],
                "answer": answer[row],
                "metadata": metadata[row],
            }
            given = self._given(completion_text(completion))
            score = float(self._scorer(str(metadata[row]["source_dataset"]))(given, entry))
            scores.append(float(score >= 1.0) if self.strict else score)
        return scores

    def _given(self, text: str) -> str | None:
        if self.extract is None:
            return text.strip()
        found = self.extract.search(text)
        return None if found is None else found.group((found.lastindex and 1) or 0)

    def _scorer(self, task: str) -> Any:
        if task not in self._scorers:
            try:
                gym = importlib.import_module("reasoning_gym")
            except ImportError as error:
                raise RewardError(
                    "ReasoningGymScore needs the package reasoning-gym: pip install 'lrlhf[tasks]'"
                ) from error
            self._scorers[task] = gym.get_score_answer_fn(task)
        return self._scorers[task]


def _column(columns: Mapping[str, Any], name: str, reward: str) -> Sequence[Any]:
    if name not in columns:
        known = sorted(columns.keys() - {"prompts", "completion_ids", "log_metric", "log_extra"})
        raise RewardError(
            f"{reward}.answer_column is {name!r}, but the data have no such column; theirs are: "
            f"{', '.join(known) or 'none'}"
        )
    values: Sequence[Any] = columns[name]
    return values


def _compiled(
    pattern: str | None, option: str, *, flags: re.RegexFlag = re.NOFLAG
) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise RewardError(f"{option} is no regular expression: {error} in {pattern!r}") from error


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold().removesuffix(".")


BUILTIN_REWARDS: dict[str, type] = {
    "exact_match": ExactMatch,
    "numeric_answer": NumericAnswer,
    "repetition_penalty": RepetitionPenalty,
    "reasoning_gym": ReasoningGymScore,
}
"""Rewards that work without arguments, by the short name that a config may use."""
