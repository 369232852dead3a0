"""Environments whose actions are texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable


class TextEnvironment(ABC):
    """An environment that reads what the policy wrote, instead of offering tools.

    For tasks of small models, which write ``guess: 42`` more reliably than a call in JSON. It may
    have ``reset``, ``reward``, ``get_reward``, ``done`` and ``close`` as any environment.
    """

    @abstractmethod
    def step(self, action: str) -> str | Awaitable[str | None] | None:
        """Answer a turn of the policy's.

        Args:
            action: The turn, without special tokens and without the stop string that ended it.

        Returns:
            What the policy reads next: the user's turn of a chat; in plain text it is put behind
            the policy's text as it is. None: the episode is over.
        """
