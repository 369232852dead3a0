"""What an environment gave, as part of the score of its episode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from lrlhf.rewards import RewardResult
from lrlhf.types import Rollout


@contextmanager
def scored_episodes(rollout: Rollout) -> Iterator[Mapping[str, Sequence[Any]]]:
    """Give reward functions what they may ask for of episodes, and close the environments then."""
    episodes = rollout.episodes
    if episodes is None:
        yield {}
        return
    try:
        yield {"episodes": episodes, "environments": [one.environment for one in episodes]}
    finally:
        for episode in episodes:
            if episode.release is not None:
                episode.release()


def with_turn_rewards(rollout: Rollout, rewards: RewardResult) -> tuple[Rollout, RewardResult]:
    """Weigh the rewards of turns as the score weighs them, and leave failed episodes unscored."""
    if rollout.episodes is None:
        return rollout, rewards
    failed = torch.tensor([bool(episode.failure) for episode in rollout.episodes])
    rewards = replace(rewards, scores=rewards.scores.masked_fill(failed, torch.nan))
    if rollout.turn_rewards is None or rewards.turn_weights is None:
        return rollout, rewards
    weights = rewards.turn_weights.to(rollout.turn_rewards)
    return replace(rollout, turn_rewards=rollout.turn_rewards * weights[:, None]), rewards
