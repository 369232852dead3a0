"""An environment of several turns that a run can be killed in."""

from typing import Any

from PIL import Image

from lrlhf.environments import TextEnvironment
from tests.faults.kill_points import KillPoint
from tests.faults.rewards import letters

TURNS = 3


class Letters(TextEnvironment):
    """Counts the turns aloud; each pays the share of its characters that are ASCII letters."""

    def reset(self) -> str:
        self.turns = 0
        return "?"

    def step(self, action: str) -> str | None:
        self.turns += 1
        KillPoint.turn(self.turns)
        (self.paid,) = letters([action])
        return f"({self.turns})" if self.turns < TURNS else None

    def reward(self) -> float:
        return self.paid


class Pictures(Letters):
    """Shows the prompt's image, cropped by what the turn says, behind each turn but the last."""

    def reset(self, images: list[Image.Image]) -> Any:  # type: ignore[override]
        self.image = images[0]
        return super().reset()

    def step(self, action: str) -> Any:
        text = super().step(action)
        left = sum(map(ord, action)) % 16
        return text and [text, self.image.crop((left, 0, left + 16, 16))]
