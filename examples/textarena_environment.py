"""Games of TextArena for one player: an environment that wraps another package's.

    episodes:
      environment: lrlhf.examples.textarena_environment.TextArenaEnvironment
      options: {id: GuessTheNumber-v0-raw}

It needs TextArena: pip install "textarena>=0.7.4,<0.8".
"""

from __future__ import annotations

import importlib
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lrlhf.environments.session import TextEnvironment

_DRAWING = threading.Lock()


class TextArenaEnvironment(TextEnvironment):
    """A game of TextArena for one player.

    The policy reads the game's instructions at the start and then its messages after each turn.
    The game decides about an invalid move. Its result at the end is the reward of the episode; a
    game that is cut off before gives 0.

    Args:
        id: A game in its version without wrappers, such as ``GuessTheNumber-v0-raw``; the wrapped
            ones repeat the conversation in each turn.
        arguments: Of the game, such as ``{max_number: 50}``.

    Raises:
        ValueError: There is no such game, or it is wrapped.
    """

    def __init__(self, id: str, arguments: Mapping[str, Any] | None = None) -> None:
        self._textarena = importlib.import_module("textarena")
        self._game = self._textarena.make(id, **(arguments or {}))
        if isinstance(self._game, self._textarena.Wrapper):
            raise ValueError(f"{id} repeats the conversation in each turn: take {id}-raw")
        self._random: Any = None
        self.done = False
        self.info: Mapping[str, Any] = {}
        """Of the last step, for reward functions that name ``environments``."""

    def reset(self, seed: int) -> str:
        with self._draws():
            self._game.reset(num_players=1, seed=seed)
        return self._news()

    def step(self, action: str) -> str:
        with self._draws():
            self.done, self.info = self._game.step(action)
        return self._news()

    def get_reward(self) -> float:
        rewards, self.info = self._game.close()
        return float((rewards or {}).get(0, 0.0))

    def _news(self) -> str:
        """Return the messages of the game since the last call."""
        _, messages = self._game.get_observation()
        own = self._textarena.ObservationType.PLAYER_ACTION
        return "\n".join(text for _, text, kind in messages if kind is not own)

    @contextmanager
    def _draws(self) -> Iterator[None]:
        """Give the game a random state of its own: games use Python's global one."""
        with _DRAWING:
            outside = random.getstate()
            if self._random is not None:
                random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(outside)
