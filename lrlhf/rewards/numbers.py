"""Finding numbers in text, and telling whether two answers are the same."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from fractions import Fraction
from types import ModuleType
from typing import Literal

from lrlhf.rewards.result import RewardError

_NUMBER = re.compile(
    r"""
    (?<![\w.])                            # not inside a word or another number
    [-+\u2212]?\s?[$\u20ac\u00a3]?
    (?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)      # 1,234 or 1234
    (?:\.\d+)?
    (?:\s?/\s?\d+(?:\.\d+)?)?             # 3/4
    |(?<![\w.])[-+\u2212]?\.\d+           # .5
    """,
    re.VERBOSE,
)


def numbers_in(text: str) -> list[str]:
    """Every number in a text, as it is written, in order.

    A minus counts as a sign where no digit or word stands right before it: ``3 - 5`` holds 3 and
    5, ``= -5`` holds -5.
    """
    found = []
    for match in _NUMBER.finditer(text):
        number = match.group()
        before = text[: match.start()].rstrip()
        if number[0] in "-+\u2212" and before and (before[-1].isalnum() or before[-1] in ")]"):
            number = number[1:]
        found.append(number.strip())
    return found


def last_boxed(text: str) -> str | None:
    r"""Contents of the last ``\boxed{…}``, braces inside it balanced; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    first = start + len("\\boxed{")
    for position in range(first, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            if depth == 0:
                return text[first:position].strip()
            depth -= 1
    return None


def as_fraction(text: str) -> Fraction | None:
    """Value of a number as people write it; None where it is not one number."""
    plain = re.sub(r"[\s$\u20ac\u00a3,]|\\[$!,]", "", text).replace("\u2212", "-").rstrip(".")
    percent = plain.endswith("%")
    plain = plain.removesuffix("%").removesuffix("\\")
    numerator, _, denominator = plain.partition("/")
    try:
        value = Fraction(numerator)
        if denominator:
            value /= Fraction(denominator)
    except (ValueError, ZeroDivisionError):
        return None
    return value / 100 if percent and "/" not in plain else value


def same_answer(
    given: str,
    wanted: str,
    *,
    tolerance: float,
    math_verify: Literal["auto", "always", "never"],
) -> bool:
    """Tell whether two answers have the same value.

    Args:
        given: The response's.
        wanted: The data's.
        tolerance: Largest difference, relative to the wanted value where that is above 1.
        math_verify: Whether what is not two plain numbers goes to math-verify.
    """
    left, right = as_fraction(given), as_fraction(wanted)
    if left is not None and right is not None:
        # 50% and 50 are both ways to write what a percentage asks for
        candidates = [left, left * 100] if "%" in given and "%" not in wanted else [left]
        scale = max(1.0, abs(float(right)))
        return any(abs(float(value - right)) <= tolerance * scale for value in candidates)
    if given.strip() == wanted.strip():
        return True
    if math_verify == "never":
        return False
    module = _math_verify(required=math_verify == "always")
    if module is None:
        return False
    # its own time limits use signals, which only work in the main thread; rewards run in others
    parsed = [module.parse(f"${text}$", parsing_timeout=None) for text in (wanted, given)]
    return bool(module.verify(*parsed, timeout_seconds=None))


@functools.cache
def _math_verify(*, required: bool) -> ModuleType | None:
    if importlib.util.find_spec("math_verify") is None:
        if required:
            raise RewardError(
                "NumericAnswer.math_verify is 'always', but math-verify is not installed: "
                "pip install 'lrlhf[math]'"
            )
        return None
    return importlib.import_module("math_verify")
