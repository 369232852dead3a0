"""What the environment of an episode gave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from lrlhf.rewards.function import RewardError, RewardFunction
from lrlhf.types import Episode


class EnvironmentReward(RewardFunction):
    """Sums what an environment's ``reward`` and ``get_reward`` gave for the turns of an episode.

    Algorithms that look at single turns see what each of them earned, see `Advantage.credit`.
    """

    sums_turns: ClassVar[bool] = True

    def __call__(  # type: ignore[override]  # asks for what only rollouts of episodes have
        self, *, episodes: Sequence[Episode], **columns: Any
    ) -> list[float | None]:
        """Return the sum of each episode's rewards; None: it failed.

        Raises:
            RewardError: The environment gives no rewards.
        """
        if all(episode.rewards is None and not episode.failure for episode in episodes):
            raise RewardError(
                "the environment has neither reward() nor get_reward(), or the agent returned "
                "None: let it give a reward, or score its episodes with a function of yours that "
                "takes `environments` or `episodes`"
            )
        return [
            None if episode.failure else math.fsum(episode.rewards or ()) for episode in episodes
        ]
