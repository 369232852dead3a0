"""What stands in the place of rewards where a policy learns from a teacher alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lrlhf.rewards.failures import Failures
from lrlhf.rewards.function import RewardError, first_of
from lrlhf.rewards.reward_values import RewardResult
from lrlhf.rewards.rewards import Rewards
from lrlhf.types import Prompt

_WINDOW = 100
"""Responses of which more than half must not have failed: batches may be small, and a single
accident is no reason to stop."""
_ENOUGH = 20
"""Responses that must be known before their share says something."""
_WHOLE_BATCH = 4
"""Responses of a call that do not all fail by accident."""


class NoRewards(Rewards):
    """Gives every response the score 0; those whose episode failed have none.

    No function can say how many may fail, as `Rewards.max_unscorable_fraction` does. So it refuses
    only an environment that is broken: where more than half of the last 100 responses failed, as
    soon as 20 are known, or all of a call with 4 or more.
    """

    def __init__(self) -> None:
        self.names = ()
        self._functions = []
        self._failures = Failures(None)
        self._recent: list[bool] = []
        """Of the last responses: whether their episodes failed."""

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
        if limited:
            self._note([row in failed for row in range(len(prompts))], failures)
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

    def _note(self, failed: list[bool], failures: Sequence[str]) -> None:
        """Count the responses of a call, and look whether too many of the last ones failed."""
        self._recent = [*self._recent, *failed][-max(_WINDOW, len(failed)) :]
        recent = self._recent
        if len(failed) >= _WHOLE_BATCH and all(failed):
            recent = failed
        elif not any(failed) or len(recent) < _ENOUGH or 2 * sum(recent) <= len(recent):
            return
        raise RewardError(
            f"{sum(recent)} of the last {len(recent)} episodes failed, and a teacher sees none of "
            f"them. Repair the environment. First failure of this batch: {failures[0]}"
        )
