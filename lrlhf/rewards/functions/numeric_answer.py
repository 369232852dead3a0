"""Rewards for questions whose answer is a number or a mathematical expression."""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from lrlhf.rewards.function import (
    Completion,
    RewardFunction,
    before_open_thought,
    check_positive,
    column_of,
    completion_text,
    outside_thoughts,
)
from lrlhf.rewards.functions.one_by_one import (
    TextPattern,
    UnscorableError,
    scores_one_by_one,
    shared,
)
from lrlhf.rewards.reward_values import shorten

logger = logging.getLogger(__name__)

_COMPARE = "expressions.py:compare"
_MARK = "####"
_MAX_LENGTH = 1000  # a policy may write digits until it is stopped; Python refuses 4300
_CURRENCY = "$€£¥"
_PLAIN = (
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d++)(?:\.\d++)?|\.\d++)"
    r"(?:[eE][+-]?\d{1,3}(?!\d))?(?![eE][+-]?\d)"  # larger exponents would fill the memory
)
_SIGN = r"(?:(?<![\w.)\]}])[-+])?"
_NUMBER = re.compile(
    rf"(?<![\w.]){_SIGN}[{_CURRENCY}]?{_SIGN}(?P<top>{_PLAIN})(?:\s*/\s*(?P<bottom>{_PLAIN}))?"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*([\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}")
_WITH_UNIT = re.compile(r"(\S+)(?:\s+[^\W\d_]{2,})+")
_BRACE = re.compile(r"\\f?boxed\s*\{|[{}]")
_REPLACED = {"−": "-", "–": "-", "\\$": "$", "\\%": "%", "\\!": "", "\\,": "", "{,}": ","}


class NumericAnswer(RewardFunction):
    r"""1 if the response gives the right number, else 0; no value without a right answer.

    The right answer is the text after ``####`` in its column, else the content of ``\boxed{}``,
    else the whole column. Units, currency and percent signs and thousands separators are ignored.
    An answer that is not a number is compared as an expression by ``math-verify`` in a separate
    process. A response whose comparison exceeds ``timeout`` scores 0 and is reported. Thoughts up
    to ``</think>`` hold no answer (a regular expression may match in them), and neither does a
    thought that is never closed.

    Args:
        answer_column: Data column with the right answer, a number or text.
        which: Where to find the response's answer. ``last``: the number after the last ``####``,
            else the last number; ``first``: the first number; ``boxed``: the content of the last
            ``\boxed{}``. Anything else is a regular expression: the last number in its last match
            counts, or in the first group of that match, if it has one.
        tolerance: Accepted difference, relative to the answer if that is larger than 1.
        use_math_verify: ``auto``: for right answers that are not numbers, if it is installed
            (``pip install 'lrlhf[math]'``); true: also if numbers differ, as it reads more
            notations; false: never. Without it, answers that are not numbers give no score.
        timeout: Seconds for comparing one response with ``math-verify``.
    """

    @classmethod
    def columns_read(cls, options: Mapping[str, Any]) -> Iterable[str]:
        return (str(options.get("answer_column", "answer")),)

    def __init__(
        self,
        answer_column: str = "answer",
        which: str = "last",
        tolerance: float = 1e-6,
        use_math_verify: bool | Literal["auto"] = "auto",
        timeout: float = 10.0,
    ) -> None:
        check_positive(timeout=timeout)
        if not 0 <= tolerance < 1:
            raise ValueError(f"tolerance is {tolerance}; it must lie in [0, 1)")
        self.answer_column = answer_column
        self._which = which
        named = which in ("last", "first", "boxed")
        self._pattern = None if named else TextPattern(which, "which")
        self._tolerance = Fraction(tolerance)
        self._use_math_verify = use_math_verify
        self._timeout = timeout
        self._unreadable: set[str] = set()
        """Right answers that math-verify does not finish reading."""
        self._warned = False

    def prepare(self) -> None:
        """Start the process with math-verify, which takes a second, if it is certain to be used.

        Raises:
            ImportError: It must be used and is not installed.
        """
        if self._use_math_verify is True:
            if not _has_math_verify():
                raise ImportError(
                    "use_math_verify needs the package math-verify: pip install 'lrlhf[math]'"
                )
            shared(_COMPARE).start()

    def __call__(self, *, completions: Sequence[Completion], **columns: Any) -> list[float | None]:
        answers = column_of(columns, self.answer_column, setting="answer_column")
        return scores_one_by_one(
            lambda row, share: self._score(completion_text(completions[row]), answers[row], share),
            len(completions),
        )

    def answer_of(self, text: str) -> str | None:
        """Return the number in a response, else what may be an expression; for majority votes."""
        text = self._searched(text)
        number = self._number(text)
        if number is not None:
            return str(number)
        expression = self._expression(text)
        return None if expression is None else "".join(expression.split()) or None

    def _score(self, text: str, answer: object, share: float) -> float | None:
        if answer is None:
            return None
        text = self._searched(text)
        right_text = _right_part(str(answer))
        right = only_number(right_text)
        if right is not None:
            number = self._number(text)
            accepted = self._tolerance * max(Fraction(1), abs(right))
            if number is not None and abs(number - right) <= accepted:
                return 1.0
            if self._use_math_verify is not True:
                return 0.0
        elif self._use_math_verify is False or not _has_math_verify():
            self._warn(answer)
            return None
        expression = self._expression(text)
        return 0.0 if expression is None else self._equal(right_text, expression, share)

    def _equal(self, right: str, answer: str, share: float) -> float | None:
        if right in self._unreadable:
            return None
        try:
            return shared(_COMPARE).score(share * self._timeout, right=right, answer=answer)
        except UnscorableError:
            self._check_readable(right)
            if right not in self._unreadable:
                raise  # it was the response
            return None

    def _check_readable(self, right: str) -> None:
        try:
            shared(_COMPARE).score(self._timeout, right=right, answer=right)
        except UnscorableError as error:
            self._unreadable.add(right)
            logger.warning(
                "NumericAnswer: math-verify cannot read the right answer %s, which gives no "
                "score: %s",
                shorten(right),
                str(error).splitlines()[-1],
            )

    def _searched(self, text: str) -> str:
        """Return the part of a response that may hold the answer."""
        return outside_thoughts(text) if self._pattern is None else before_open_thought(text)

    def _number(self, text: str) -> Fraction | None:
        if self._which == "boxed":
            inside = boxed(text)
            return None if inside is None else only_number(inside.rpartition("=")[2])
        if self._which == "last" and _MARK in text:
            return next(iter(numbers_in(text.rpartition(_MARK)[2])), None)
        if self._pattern is not None:
            text = self._pattern.last(text) or ""
        numbers = numbers_in(text)
        if not numbers:
            return None
        return numbers[0 if self._which == "first" else -1]

    def _expression(self, text: str) -> str | None:
        if self._pattern is not None:
            return self._pattern.last(text)
        if self._which == "boxed":
            return boxed(text)
        if self._which == "last" and _MARK in text:
            return text.rpartition(_MARK)[2]
        lines = [line for line in text.splitlines() if line.strip()]
        return lines[0 if self._which == "first" else -1] if lines else None

    def _warn(self, answer: object) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "NumericAnswer: the right answer %s is no number, and gives no score: install "
                "math-verify (pip install 'lrlhf[math]') and leave use_math_verify at auto, or set "
                "answer_column to a column with numbers.",
                shorten(answer),
            )


@functools.cache
def _has_math_verify() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def _right_part(answer: str) -> str:
    if _MARK in answer:
        return answer.rpartition(_MARK)[2].strip()
    inside = boxed(answer)
    return answer.strip() if inside is None else inside


def numbers_in(text: str) -> list[Fraction | None]:
    """Return every number of the text in its order; None: one that is too long or x/0.

    Thousands separators, currency signs, fractions (LaTeX's too) and a sign directly before are
    read; digits that are part of a word are none.
    """
    return [_value(match) for match in _NUMBER.finditer(_tidy(text))]


def only_number(text: str) -> Fraction | None:
    """Return the number that is all of the text but for a unit, a percent sign or a full stop."""
    stripped = _tidy(text).strip().strip("$").strip().removesuffix(".").strip()
    if match := _WITH_UNIT.fullmatch(stripped):
        stripped = match[1]
    match = _NUMBER.fullmatch(stripped.removesuffix("%").strip())
    return None if match is None else _value(match)


def boxed(text: str) -> str | None:
    r"""Return the content of the last complete ``\boxed{...}``, inner braces included."""
    last: tuple[int, int] | None = None
    unclosed: list[int | None] = []  # braces, of boxes with the start of their content
    for match in _BRACE.finditer(text):
        if match[0] != "}":
            unclosed.append(match.end() if "boxed" in match[0] else None)
        elif unclosed and (start := unclosed.pop()) is not None and start > (last or (-1,))[0]:
            last = (start, match.start())
    return None if last is None else text[slice(*last)]


def _tidy(text: str) -> str:
    for old, new in _REPLACED.items():
        text = text.replace(old, new)
    return _FRACTION.sub(r"\1/\2", text)


def _value(match: re.Match[str]) -> Fraction | None:
    top, bottom = match["top"], match["bottom"]
    if len(match[0]) > _MAX_LENGTH:
        return None
    value = Fraction(top.replace(",", ""))
    if bottom is not None:
        divisor = Fraction(bottom.replace(",", ""))
        if divisor == 0:
            return None
        value /= divisor
    negative = "-" in match[0][: match.start("top") - match.start()]
    return -value if negative else value
