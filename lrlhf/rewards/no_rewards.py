"""What stands in the place of rewards where a policy learns from a teacher alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lrlhf.rewards.reward_values import RewardResult
from lrlhf.rewards.rewards import Rewards
from lrlhf.types import Prompt


class NoRewards(Rewards):
    """Gives every response the score 0; those whose episode failed have none."""

    def __init__(self) -> None:
        self.names = ()
        self._functions = []

    def beside_a_run(self) -> NoRewards:
        return self

    def score(
        self,
        prompts: Sequence[Prompt],
        *_: Any,
        failed: Mapping[int, str] | None = None,
        **__: Any,
    ) -> RewardResult:
        """See `Rewards.score`."""
        scores = torch.zeros(len(prompts))
        scores[[*(failed or {})]] = math.nan
        return RewardResult(
            scores=scores,
            per_function=torch.zeros(len(prompts), 0),
            names=(),
            metrics={},
            extras={},
            failures=list((failed or {}).values()),
            seconds={},
            turn_weights=torch.zeros(len(prompts)),
        )
