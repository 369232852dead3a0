r"""Reading numbers from text as people and language models write them."""

from __future__ import annotations

import re
from fractions import Fraction

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
    r"""Return what the last complete ``\boxed{...}`` holds, inner braces included."""
    found: tuple[int, int] | None = None
    unclosed: list[int | None] = []  # braces, of boxes where what they hold begins
    for match in _BRACE.finditer(text):
        if match[0] != "}":
            unclosed.append(match.end() if "boxed" in match[0] else None)
        elif unclosed and (start := unclosed.pop()) is not None and start > (found or (-1,))[0]:
            found = (start, match.start())
    return None if found is None else text[slice(*found)]


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
