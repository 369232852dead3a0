"""Environments of Gymnasium."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from lrlhf.environments.session import EnvironmentFailure, Reaction
from lrlhf.media import MediaOptions
from tests.environments.adapters.sessions import opened, told

gymnasium = pytest.importorskip("gymnasium")
Discrete, Text = gymnasium.spaces.Discrete, gymnasium.spaces.Text
TransformAction = gymnasium.wrappers.TransformAction
TransformObservation = gymnasium.wrappers.TransformObservation

LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789"


class Doors(gymnasium.Env[str, str]):
    """The door with the seed's number leads out; each other one costs a point."""

    observation_space = Text(40, charset=LETTERS)
    action_space = Text(6, charset=LETTERS)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.right = f"door {seed}"
        return f"choose {(options or {}).get('of', 'a door')}", {"tries": 0}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action == self.right
        return "out" if right else "a wall", 1.0 if right else -1.0, right, False, {"tries": 1}


class Switch(gymnasium.Env[int, int]):
    """On or off; it does not end by itself."""

    observation_space = Discrete(2)
    action_space = Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return action, float(action), False, False, {}


gymnasium.register("Doors-v0", Doors, disable_env_checker=True)
gymnasium.register("Switch-v0", Switch, disable_env_checker=True)


def in_words(environment: Any) -> Any:
    """Observations and actions of the switch as words."""

    def action_of(word: str) -> int:
        if word not in ("off", "on"):
            raise gymnasium.error.InvalidAction("say on or off")
        return ("off", "on").index(word)

    words = Text(10, charset=LETTERS)
    seen = TransformObservation(environment, lambda state: f"it is {('off', 'on')[state]}", words)
    return TransformAction(seen, action_of, words)


def reactions(said: Sequence[str], row: dict[str, Any] | None = None, **options: Any) -> list[Any]:
    async def played() -> list[Any]:
        async with opened("GymnasiumEnvironment", row, **options) as (one, shown, say):
            heard = [await say(text) for text in said]
            return [shown, *heard, await one.outcome(), one.has_rewards, one.environment.info]

    return asyncio.run(played())


def test_texts_go_in_and_out_with_rewards_of_turns() -> None:
    row = {"options": {"of": "three doors"}, "prompt": "x"}
    shown, wrong, odd, right, outcome, rewards, info = reactions(
        [" door 1\n", "DOOR", "door 7"], row, id="Doors-v0"
    )
    assert shown == "choose three doors"
    assert wrong == Reaction((), ({"role": "user", "content": "a wall"},), -1.0, None)
    assert told(odd).startswith("error: 'DOOR' is not in Text(")
    assert (odd.reward, odd.finish_reason) == (0.0, None)
    assert (right.reward, right.finish_reason, right.messages) == (1.0, "done", ())
    assert (outcome, rewards, info) == (0.0, True, {"tries": 1})


@pytest.mark.parametrize("wrapper", [in_words, f"{__name__}.in_words"])
def test_a_wrapper_makes_spaces_text(wrapper: str | Callable[[Any], Any]) -> None:
    arguments = {"max_episode_steps": 2}  # of gymnasium.make: the second step is truncated
    shown, odd, on, off, *_ = reactions(
        ["yes", "on", "off"], id="Switch-v0", wrapper=wrapper, arguments=arguments
    )
    assert shown == "it is off"
    assert (told(odd), odd.reward) == ("error: say on or off", 0.0)
    assert (told(on), on.reward, on.finish_reason) == ("it is on", 1.0, None)
    assert (off.reward, off.finish_reason) == (0.0, "done")


class Screen(gymnasium.Env[Any, str]):
    """A picture as observation, and another one drawn."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012  Gymnasium's own
    observation_space = gymnasium.spaces.Box(0, 255, (4, 6, 3), np.uint8)
    action_space = Text(6, charset=LETTERS)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros((4, 6, 3), np.uint8), {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.full((4, 6, 3), 9, np.uint8), 1.0, False, False, {}

    def render(self) -> Any:
        return np.full((2, 3, 3), 7, np.uint8) if self.render_mode else None


gymnasium.register("Screen-v0", Screen, disable_env_checker=True, order_enforce=False)


def test_images_are_observations_and_drawn() -> None:
    shown, seen, *_ = reactions(["go"], id="Screen-v0", media=MediaOptions())
    (image,) = seen.messages[0]["content"]
    assert np.array_equal(image["image"], np.full((4, 6, 3), 9))
    drawn, *_ = reactions(
        [],
        id="Screen-v0",
        media=MediaOptions(),
        render=True,
        arguments={"render_mode": "rgb_array"},
    )
    assert [np.asarray(part["image"]).max() for part in (*shown, *drawn)] == [0, 0, 7]
    with pytest.raises(EnvironmentFailure, match='render_mode: "rgb_array"'):
        reactions([], id="Screen-v0", media=MediaOptions(), render=True)
    with pytest.raises(EnvironmentFailure, match="returned a dict, not text or None"):
        reactions([], id="Screen-v0")  # to a policy that reads text


def test_spaces_that_are_no_text_are_named() -> None:
    with pytest.raises(
        EnvironmentFailure, match=r"observation space of Switch-v0 is Discrete\(2\)"
    ):
        reactions([], id="Switch-v0")

    def half(environment: Any) -> Any:
        return TransformObservation(environment, str, Text(1, charset="01"))

    with pytest.raises(EnvironmentFailure, match=r"action space of Switch-v0 is Discrete\(2\)"):
        reactions([], id="Switch-v0", wrapper=half)
