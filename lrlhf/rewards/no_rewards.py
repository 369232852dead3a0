"""What stands in the place of rewards where a policy learns from a teacher alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lrlhf.rewards.failures import MAX_UNSCORABLE_FRACTION, Failures
from lrlhf.rewards.function import RewardError, first_of
from lrlhf.rewards.reward_values import RewardResult
from lrlhf.rewards.rewards import Rewards
from lrlhf.types import Prompt


class NoRewards(Rewards):
    """Gives every response the score 0; those whose episode failed have none."""

    def __init__(self) -> None:
        self.names = ()
        self._functions = []
        self._failures = Failures(None)

    def beside_a_run(self) -> NoRewards:
        return NoRewards()

    def score(
        self,
        prompts: Sequence[Prompt],
        *_: Any,
        limited: bool = True,
        failed: Mapping[int, str] | None = None,
        **__: Any,
    ) -> RewardResult:
        """See `Rewards.score`.

        Raises:
            RewardError: Too many episodes failed, and nothing would be learnt from them.
        """
        failed = failed or {}
        scores = torch.zeros(len(prompts))
        scores[[*failed]] = math.nan
        failures = []
        if failed:
            reason = first_of(failed, f"{len(failed)} episodes failed")
            failures.append(f"environment: {reason}")
            self._failures.log(failures[0])
        if limited and len(failed) > MAX_UNSCORABLE_FRACTION * len(prompts):
            raise RewardError(
                f"{len(failed)} of {len(prompts)} episodes failed (allowed: "
                f"{MAX_UNSCORABLE_FRACTION:.0%}), and a teacher sees none of them. Repair the "
                f"environment. First failure: {failures[0]}"
            )
        return RewardResult(
            scores=scores,
            per_function=torch.zeros(len(prompts), 0),
            names=(),
            metrics={},
            extras={},
            failures=failures,
            seconds={},
            turn_weights=torch.zeros(len(prompts)),
        )
