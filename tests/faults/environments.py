"""An environment of several turns that a run can be killed in."""

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
