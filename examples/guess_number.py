"""Guess a number by hints: an environment of several turns, and the rows that it plays.

    lrlhf fit --config configs/guess_number.yaml

`GuessNumber` is all that an environment has to be. It reads text, because a model of 135 million
parameters writes a number more reliably than a call in JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from lrlhf.datamodules import Source
from lrlhf.environments import TextEnvironment

SIZE = 9
"""Numbers that the secret one is among."""


class GuessNumber(TextEnvironment):
    """Answers a guess with ``higher``, ``lower`` or ``correct``.

    Args:
        guesses: Allowed; an episode that needs more is lost.
    """

    def __init__(self, guesses: int = 4) -> None:
        self.guesses = guesses

    def reset(self, target: int) -> None:
        """Begin a game, from a row's column ``target``."""
        self.target = target
        self.made = 0
        self.won = False

    def step(self, action: str) -> str | None:
        """Answer a guess; None: the game is over."""
        self.made += 1
        number = re.match(r"\s*(\d{1,9})\b", action)
        self.won = number is not None and int(number[1]) == self.target
        if self.won or number is None or self.made == self.guesses:
            return None
        return f"{'higher' if int(number[1]) < self.target else 'lower'}\nguess:"

    def get_reward(self) -> float:
        """Return 1 for a game that is won."""
        return float(self.won)


class Games(Source):
    """Every number of every range, as rows ``first``, ``last`` and ``target``.

    Args:
        ranges: How many; the n-th is from 10 n + 1 to 10 n + 9.
    """

    def __init__(self, ranges: int = 90) -> None:
        self.ranges = ranges

    @property
    def name(self) -> str:
        return "games"

    def rows(self) -> Iterable[dict[str, Any]]:
        for number in range(self.ranges):
            first = 10 * number + 1
            for target in range(first, first + SIZE):
                yield {"first": first, "last": first + SIZE - 1, "target": target}
