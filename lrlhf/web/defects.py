"""Defects of a service in its log: where they are, and no line for every request that meets one."""

from __future__ import annotations

import logging
import traceback
from collections import Counter

logger = logging.getLogger(__name__)

_counts: Counter[tuple[str, str]] = Counter()


def log_defect(what: str, error: Exception) -> None:
    """Log where an error was raised, and not its message, which may quote what was sent.

    The same error at the same place is logged once, and then by its number: 10, 100, ....
    """
    trace = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    key = (type(error).__name__, trace)
    _counts[key] += 1
    number = str(_counts[key])
    if number == "1":
        logger.error("%s %s:\n%s", what, type(error).__name__, trace)
    elif number.strip("0") == "1":
        logger.error("%s %s, as before: %s times by now", what, type(error).__name__, number)
