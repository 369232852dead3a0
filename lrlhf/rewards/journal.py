"""What one reward function logs during one call."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from lrlhf.rewards.reward_values import finite_number


class Logged(NamedTuple):
    """Everything logged until the journal was closed."""

    metrics: dict[str, list[float]]
    extras: dict[str, list[Any]]


class Journal:
    """Collects metrics and columns from any thread until it is closed.

    A function that timed out may go on for minutes; what it logs then is dropped.

    Args:
        function: Name for the errors.
        count: How many responses the function was given.
    """

    def __init__(self, function: str, count: int) -> None:
        self._function = function
        self._count = count
        self._lock = threading.Lock()
        self._closed = False
        self._metrics: dict[str, list[float]] = {}
        self._extras: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Log a number; logged again under the same name in one call, the mean counts.

        Raises:
            ValueError: It is no finite number.
        """
        number = finite_number(value)
        if number is None:
            raise ValueError(f"log_metric({name!r}, {value!r}): the value must be a finite number")
        with self._lock:
            if not self._closed:
                self._metrics.setdefault(str(name), []).append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add a column to the log of responses.

        Raises:
            ValueError: There is not exactly one value per response.
        """
        entries = list(values)
        if len(entries) != self._count:
            raise ValueError(
                f"log_extra({column!r}): {len(entries)} values for {self._count} responses; give "
                "one value per response"
            )
        with self._lock:
            if not self._closed:
                self._extras[str(column)] = entries

    def close(self) -> Logged:
        """Return what was logged, and drop whatever comes later."""
        with self._lock:
            self._closed = True
            return Logged(self._metrics, self._extras)
