"""Environments of Gymnasium whose actions are texts, and whose observations texts or images."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lrlhf.environments.session import TextEnvironment
from lrlhf.functional.names import import_function


class GymnasiumEnvironment(TextEnvironment):
    """An environment of Gymnasium.

    Its action space must be ``gymnasium.spaces.Text``, and its observation space that or a ``Box``
    of uint8 `[H, W]`, `[H, W, 3]` or `[H, W, 4]`, an image; ``wrapper`` makes them so.
    The policy reads the observations, and its turns, without white space at their ends, are the
    actions. One that is outside the action space, or at which the wrapper raises
    ``gymnasium.error.InvalidAction``, is no step: the policy reads why, and can try again.

    Args:
        id: As ``gymnasium.make`` takes it, such as ``my_package:Maze-v0``.
        wrapper: Import path of a function or class that takes the environment and returns it with
            spaces of text, as Gymnasium's own ``TransformObservation`` and ``TransformAction`` do.
        arguments: Further ones of ``gymnasium.make``.
        render: Show what ``render`` draws behind each observation; ``arguments`` need
            ``render_mode: rgb_array``.

    Raises:
        ValueError: A space is of another kind, or the wrapper cannot be imported.
    """

    def __init__(
        self,
        id: str,
        wrapper: str | Callable[[Any], Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        render: bool = False,
    ) -> None:
        gymnasium = importlib.import_module("gymnasium")
        if isinstance(wrapper, str):
            wrapper = import_function("wrapper", wrapper, ())
        environment = gymnasium.make(id, **(arguments or {}))
        self._environment = wrapper(environment) if wrapper is not None else environment
        self._invalid = gymnasium.error.InvalidAction
        self._render = render
        spaces, seen = gymnasium.spaces, self._environment.observation_space
        pixels = isinstance(seen, spaces.Box) and seen.dtype == np.uint8
        self._sees = pixels and (len(seen.shape) == 2 or seen.shape[2:] in ((3,), (4,)))
        for kind in ("action",) if self._sees else ("observation", "action"):
            space = getattr(self._environment, f"{kind}_space")
            if not isinstance(space, spaces.Text):
                self._environment.close()
                raise ValueError(
                    f"the {kind} space of {id} is {space}, not gymnasium.spaces.Text: give a "
                    "wrapper that makes it text"
                )
        self.done = False
        self.info: Mapping[str, Any] = {}
        """Of the last observation, for reward functions that name ``environments``."""

    def reset(self, seed: int, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode.

        Args:
            seed: The same for all episodes of one prompt.
            options: Column of the row, for the environment's own ``reset``.
        """
        observation, self.info = self._environment.reset(seed=seed, options=options)
        return self._shown(observation)

    def step(self, action: str) -> Any:
        action, self._reward = action.strip(), 0.0
        if not self._environment.action_space.contains(action):
            return f"error: {action!r:.80} is not in {self._environment.action_space}"
        try:
            observation, reward, terminated, truncated, self.info = self._environment.step(action)
        except self._invalid as error:
            return f"error: {error}"
        self._reward = float(reward)
        self.done = bool(terminated or truncated)
        return self._shown(observation)

    def _shown(self, observation: Any) -> Any:
        shown = {"type": "image", "image": observation} if self._sees else observation
        if not self._render:
            return shown
        drawn = self._environment.render()
        if drawn is None:
            raise ValueError('render() drew nothing: give the arguments render_mode: "rgb_array"')
        return [shown, {"type": "image", "image": drawn}]

    def reward(self) -> float:
        return self._reward

    def close(self) -> None:
        self._environment.close()
