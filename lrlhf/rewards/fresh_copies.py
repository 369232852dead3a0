"""Rewards whose connections, threads and processes stay with them when they are copied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from lrlhf.rewards.function import RewardFunction


class CopiesStartAfresh(RewardFunction, ABC):
    """A reward whose copies and pickles have its settings, and nothing that runs."""

    _not_copied: ClassVar[tuple[str, ...]]
    """Attributes that `_start_afresh` sets, and that no copy gets."""

    @abstractmethod
    def _start_afresh(self) -> None:
        """Set what runs to what it is before the first call."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: kept for name, kept in self.__dict__.items() if name not in self._not_copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_afresh()


def check_positive(**values: float | None) -> None:
    """Refuse settings that are not above 0; None stands for no limit.

    Raises:
        ValueError: One is not.
    """
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}; it must be above 0")
