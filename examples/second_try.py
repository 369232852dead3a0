"""Tasks of reasoning-gym with a second try: an answer that is wrong is told so.

    lrlhf fit … --model.episodes.environment lrlhf.examples.second_try.SecondTry

The rows are those of ``lrlhf.datamodules.ReasoningGym``, whose tasks have one step each: they judge
an answer. What a try improves is the reward of its turn.
"""

from __future__ import annotations

from typing import Any

from lrlhf.environments import TextEnvironment
from lrlhf.rewards import ReasoningGymScore


class SecondTry(TextEnvironment):
    """Judges each turn as an answer, until one is right or no try is left.

    Args:
        tries: Answers that may be given.
        extract: Finds the answer in a turn, see `lrlhf.rewards.ReasoningGymScore`.
        feedback: What the policy reads after a wrong answer.
    """

    def __init__(
        self,
        tries: int = 2,
        extract: str | None = None,
        feedback: str = "That is not right. Try again.\n",
    ) -> None:
        self.tries = tries
        self.feedback = feedback
        self.judge = ReasoningGymScore(extract=extract)
        self.judge.prepare()

    def reset(self, question: str, answer: Any, metadata: dict[str, Any]) -> None:
        """Begin an episode with a row of ``ReasoningGym``."""
        self.row = {"question": [question], "answer": [answer], "metadata": [metadata]}
        self.score = self.earned = 0.0

    def step(self, action: str) -> str | None:
        """Judge an answer; None: the episode is over."""
        (score,) = self.judge(completions=[action], log_metric=lambda *_: None, **self.row)
        if score is None:
            raise ValueError("the row has no metadata: take it from lrlhf.datamodules.ReasoningGym")
        self.earned, self.score = score - self.score, score
        self.tries -= 1
        return self.feedback if score < 1 and self.tries else None

    def reward(self) -> float:
        """Return by how much the last answer is better than the one before."""
        return self.earned
