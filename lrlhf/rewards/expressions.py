"""Comparing mathematical expressions with math-verify."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import re
from types import ModuleType

_MAX_LENGTH = 300
# what a computer algebra system would work out for ever: towers, huge powers, factorials
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
        raise ImportError(
            "use_math_verify needs the package math-verify: pip install 'lrlhf[math]'"
        ) from error
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).addFilter(_is_no_timeout_remark)
    return package


def equal(right: str, given: str) -> float | None:
    """Compare two expressions.

    math-verify's own timeouts are signals, which only the main thread gets; they are off, and the
    timeout of the rewards applies.

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
