"""What an environment gave, as part of the score of its episode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lrlhf.rewards import RewardResult
from lrlhf.rollout.records import plain_json
from lrlhf.types import Episode, Rollout


@contextmanager
def scored_episodes(rollout: Rollout) -> Iterator[dict[str, Any]]:
    """Return what `Rewards.score` is told of episodes besides, and close the environments then."""
    episodes = rollout.episodes
    if episodes is None:
        yield {}
        return
    try:
        environments = [one.environment for one in episodes]
        yield {
            "on_request": {"episodes": episodes, "environments": environments},
            "failed": {row: one.failure for row, one in enumerate(episodes) if one.failure},
        }
    finally:
        for episode in episodes:
            if episode.release is not None:
                episode.release()


def with_turn_rewards(rollout: Rollout, rewards: RewardResult) -> Rollout:
    """Weigh the rewards of turns as the score weighs them."""
    if rollout.turn_rewards is None or rewards.turn_weights is None:
        return rollout
    weights = rewards.turn_weights.to(rollout.turn_rewards)
    return replace(rollout, turn_rewards=rollout.turn_rewards * weights[:, None])


def stored_episode(episode: Episode) -> dict[str, Any]:
    """Return an episode without its environment, in types that a checkpoint holds."""
    return {
        "prompt": plain_json(episode.prompt),
        "messages": plain_json(episode.messages),
        "rewards": None if episode.rewards is None else list(episode.rewards),
        "finish_reason": episode.finish_reason,
        "failure": episode.failure,
        "beside_calls": [[*one] for one in episode.beside_calls],
    }


def restored_episode(stored: Mapping[str, Any]) -> Episode:
    """Return what `stored_episode` was given; its environment is gone."""
    prompt, rewards = stored["prompt"], stored["rewards"]
    return Episode(
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        messages=tuple(stored["messages"]),
        rewards=None if rewards is None else tuple(rewards),
        finish_reason=stored["finish_reason"],
        failure=stored["failure"],
        # a checkpoint of an earlier version has none
        beside_calls=tuple((number, text) for number, text in stored.get("beside_calls", ())),
    )
