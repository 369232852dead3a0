"""Reward functions that need the library in their process."""

from collections.abc import Sequence

from lrlhf.rewards import RewardError


def stops_the_run(completions: Sequence[str]) -> list[float]:
    raise RewardError(f"no reward for {len(completions)}")
