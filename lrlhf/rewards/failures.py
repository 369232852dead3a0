"""How often each reward function fails, and when that is too often."""

from __future__ import annotations

from collections.abc import Sequence

from lrlhf.rewards.function import RewardError

_FORGIVEN = 0.1
"""What a batch without failure takes off the count, so that a long run may have its accidents."""


class FailureCount:
    """Counts the batches in which functions fail, in a row and over the run.

    A batch of which a part of the responses failed counts as that part. Over the run, ten batches
    without failure make up for one failure: a function may fail in one batch of eleven for ever,
    and one that fails in every second batch is stopped soon, whenever it begins to.

    Args:
        names: Of the functions.
        in_a_row: So many batches that failed as a whole, one after the other, are too many; None:
            never.
        in_run: So many are too many over the run; None: never.
    """

    def __init__(self, names: Sequence[str], in_a_row: int | None, in_run: int | None) -> None:
        for name, limit in {"max_failures_in_a_row": in_a_row, "max_failures": in_run}.items():
            if limit is not None and limit < 1:
                raise ValueError(f"{name} is {limit}; it must be 1 or more, or null")
        self._limits = (in_a_row, in_run)
        self._in_a_row = dict.fromkeys(names, 0)
        self._in_run = dict.fromkeys(names, 0.0)

    def add(self, name: str, part: float) -> None:
        """Note the part of a batch for which a function failed, from 0 to 1."""
        self._in_a_row[name] = self._in_a_row[name] + 1 if part == 1 else 0
        count = self._in_run[name] + part - (1 - part) * _FORGIVEN
        self._in_run[name] = max(0.0, round(count, 9))  # ten tenths are one

    def check(self, failures: Sequence[str]) -> None:
        """Stop the run if a function fails too often.

        Args:
            failures: Of this batch; each begins with the function's name.

        Raises:
            RewardError: One does.
        """
        in_a_row, in_run = self._limits
        for name in self._in_a_row:
            last = next((text for text in failures if text.startswith(f"{name}: ")), "")
            if last and in_a_row is not None and self._in_a_row[name] >= in_a_row:
                raise RewardError(
                    f"reward function {name!r} failed in {self._in_a_row[name]} batches in a row. "
                    f"Repair it, or raise max_failures_in_a_row. The last failure: {last}"
                )
            if last and in_run is not None and self._in_run[name] >= in_run:
                raise RewardError(
                    f"reward function {name!r} failed in {in_run} batches of this run, less one "
                    f"for every ten without failure. Repair it, or raise max_failures. The last "
                    f"failure: {last}"
                )
