"""Comparing mathematical expressions with math-verify, in a process of its own.

It is loaded there alone: it imports nothing of this library.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import math_verify

_MAX_LENGTH = 300
# what a computer algebra system would compute for ever, and is not even tried: towers, huge
# powers, factorials
_EXPLOSIVE = re.compile(r"(?:\^|\*\*)[\s{(+-]*\d{4,}|(?:\^|\*\*)[^=,]*(?:\^|\*\*)|!")
_MATH = re.compile(r"\$|\\boxed|\\\(|\\\[")

for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).addFilter(
        lambda record: "Timeout is disabled" not in record.getMessage()
    )


def compare(right: Sequence[str], answer: Sequence[str]) -> list[float | None]:
    """Compare right answers with those of responses, pair by pair.

    The caller limits the time: a binomial of six digits takes hours. math-verify's own timeouts
    are signals, which do not end a computation in C; they are off.

    Args:
        right: The right answers: LaTeX, or expressions.
        answer: The responses' answers, words around them allowed.

    Returns:
        1 or 0; None where the right answer cannot be read.
    """
    return [_equal(*pair) for pair in zip(right, answer, strict=True)]


def _equal(right: str, answer: str) -> float | None:
    target = _parse(right)
    if not target:
        return None
    parsed = _parse(answer)
    return float(bool(parsed) and math_verify.verify(target, parsed, timeout_seconds=None))


def _parse(text: str) -> list[object]:
    if len(text) > _MAX_LENGTH or _EXPLOSIVE.search(text):
        return []
    for candidate in (text,) if _MATH.search(text) else (rf"\boxed{{{text}}}", text):
        parsed: list[object] = math_verify.parse(candidate, parsing_timeout=None)
        if parsed:
            return parsed
    return []
