"""Comparing mathematical expressions with math-verify.

A process of its own compares, with this file alone: it imports nothing of the library.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import re
from collections.abc import Sequence
from types import ModuleType

MISSING = "use_math_verify needs the package math-verify: pip install 'lrlhf[math]'"
_MAX_LENGTH = 300
# what a computer algebra system would work out for ever, and is not even tried: towers, huge
# powers, factorials
_EXPLOSIVE = re.compile(r"(?:\^|\*\*)[\s{(+-]*\d{4,}|(?:\^|\*\*)[^=,]*(?:\^|\*\*)|!")
_MATH = re.compile(r"\$|\\boxed|\\\(|\\\[")


@functools.cache
def available() -> bool:
    """Whether math-verify is installed."""
    return importlib.util.find_spec("math_verify") is not None


@functools.cache
def load() -> ModuleType:
    """Import math-verify.

    Raises:
        ImportError: It is not installed.
    """
    try:
        package = importlib.import_module("math_verify")
    except ImportError as error:
        raise ImportError(MISSING) from error
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).addFilter(_is_no_timeout_remark)
    return package


class Comparer:
    """Compares expressions pair by pair, see `equal`; made before any time is taken."""

    def __init__(self) -> None:
        load()

    def __call__(self, right: Sequence[str], given: Sequence[str]) -> list[float | None]:
        return [equal(*pair) for pair in zip(right, given, strict=True)]


def equal(right: str, given: str) -> float | None:
    """Compare two expressions.

    Whoever calls it limits the time: a binomial of six digits takes hours. math-verify's own
    timeouts are signals, which do not end a computation in C; they are off.

    Args:
        right: The right answer: LaTeX, or an expression.
        given: The response's answer, words around it allowed.

    Returns:
        1 or 0; None where the right answer cannot be read.
    """
    package = load()
    target = _parse(package, right)
    if not target:
        return None
    found = _parse(package, given)
    return float(bool(found) and package.verify(target, found, timeout_seconds=None))


def _parse(package: ModuleType, text: str) -> list[object]:
    if len(text) > _MAX_LENGTH or _EXPLOSIVE.search(text):
        return []
    for candidate in (text,) if _MATH.search(text) else (rf"\boxed{{{text}}}", text):
        parsed: list[object] = package.parse(candidate, parsing_timeout=None)
        if parsed:
            return parsed
    return []


def _is_no_timeout_remark(record: logging.LogRecord) -> bool:
    return "Timeout is disabled" not in record.getMessage()
