"""Regular expressions of a configuration, on text that a policy wrote."""

from __future__ import annotations

import re

import regex

from lrlhf.rewards.functions.one_by_one import UnjudgedError

_TIMEOUT_S = 5.0
_LITERAL_BRACE = re.compile(r"(?<!\\)(?<!\\N)((?:\\\\)*)\{(?!\d*,?\d*\})")
"""A brace that ``re`` takes as it stands and ``regex`` for leave to match something similar."""


class TextPattern:
    """A regular expression whose ``.`` matches line breaks too, with a limit to its time.

    Python's own ``re`` has none, and holds Python's lock while it backtracks.

    Args:
        pattern: In the syntax of ``re``.
        setting: The option that holds it, for the error.

    Raises:
        ValueError: It is not valid.
    """

    def __init__(self, pattern: str, setting: str) -> None:
        try:
            re.compile(pattern, re.DOTALL)
            self._pattern = regex.compile(_LITERAL_BRACE.sub(r"\1\\{", pattern), regex.DOTALL)
        except (re.error, regex.error) as error:
            raise ValueError(f"{setting} {pattern!r} is no regular expression: {error}") from error

    def matches(self, text: str, *, whole: bool, share: float = 1.0) -> bool:
        """Whether the text has a match; with ``whole``, whether all of it is one.

        Args:
            text: To look in.
            whole: See above.
            share: Of the time that it may take.

        Raises:
            UnjudgedError: It is not found out in time.
        """
        match = self._pattern.fullmatch if whole else self._pattern.search
        try:
            return match(text, timeout=share * _TIMEOUT_S) is not None
        except TimeoutError:
            raise self._too_slow(share) from None

    def last(self, text: str, *, share: float = 1.0) -> str | None:
        """Return what the last match holds: its first group, if there is one and it took part.

        Raises:
            UnjudgedError: It is not found in time.
        """
        try:
            matches = list(self._pattern.finditer(text, timeout=share * _TIMEOUT_S))
        except TimeoutError:
            raise self._too_slow(share) from None
        if not matches:
            return None
        group = matches[-1].group(1) if self._pattern.groups else None
        return str(matches[-1].group(0) if group is None else group)

    def _too_slow(self, share: float) -> UnjudgedError:
        return UnjudgedError(
            f"the regular expression {self._pattern.pattern!r} was not done with it after "
            f"{share * _TIMEOUT_S:.2g} s of CPU time: write it so that no text can be matched in "
            "many ways"
        )
