"""The values of a page in as few bytes as they take: texts once, numbers short."""

from __future__ import annotations

import json
import math
from typing import Any

_DIGITS = 6
NOTHING = -1
"""In place of the number of a text."""


class Texts:
    """Texts of which each stands once; columns hold their numbers."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    @property
    def all(self) -> list[str]:
        """The texts in the order of their numbers."""
        return list(self._numbers)

    def number(self, text: Any) -> int:
        """Return the number of a text; of None: `NOTHING`."""
        if text is None:
            return NOTHING
        return self._numbers.setdefault(str(text), len(self._numbers))

    def json_number(self, value: Any) -> int:
        """Return the number of a value as JSON; of one that is empty: `NOTHING`."""
        return NOTHING if value in (None, "", [], {}) else self.number(json.dumps(plain(value)))


def short_number(value: Any) -> float | int | None:
    """Return a number with six digits; None of what is no number, or not finite."""
    if isinstance(value, bool | int):
        return int(value)
    if not isinstance(value, float) or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")


def plain(value: Any) -> Any:
    """Return a value that JSON has read, with None for the numbers that browsers refuse."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
