"""Sampling and scoring of responses, as training and evaluation of every policy share it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.rewards import CompletionText, RewardResult, Rewards
from lrlhf.rollout.engines.engine import RolloutEngine
from lrlhf.rollout.records import plain_json, rollout_records
from lrlhf.rollout.sampling import Sampling
from lrlhf.rollout.texts import response_texts, response_views, text_ends
from lrlhf.types import PromptBatch, Rollout


class Collected(NamedTuple):
    """Scored responses, with a record of each."""

    rollout: Rollout
    rewards: RewardResult
    records: list[dict[str, Any]]
    extra_values: Mapping[str, Float[Tensor, " B"]] = MappingProxyType({})
    """Values of each row that were sampled beside the responses, by name, such as the score of a
    greedy response; NaN: unknown."""

    def with_extra_values(self, values: Mapping[str, Float[Tensor, " B"]]) -> Collected:
        """Add values of each row, also to the records, from which stored rollouts read them."""
        listed = {name: value.tolist() for name, value in values.items()}
        records = []
        for row, record in enumerate(self.records):
            own = {name: plain_json(value[row]) for name, value in listed.items()}
            records.append({**record, "extra_values": {**record.get("extra_values", {}), **own}})
        return self._replace(records=records, extra_values={**self.extra_values, **values})


def extra_values_of(records: Sequence[Mapping[str, Any]]) -> dict[str, Float[Tensor, " B"]]:
    """Read the values back that `Collected.with_extra_values` has put into records."""
    columns = [record.get("extra_values", {}) for record in records]
    return {
        name: torch.tensor([math.nan if (value := own[name]) is None else value for own in columns])
        for name in (columns[0] if columns else {})
    }


class Collector:
    """Generates responses with an engine and scores them.

    Args:
        engine: Engine that is attached to the policy.
        rewards: Reward functions.
        tokenizer: The policy's.
        shows_media: Whether the rewards get columns ``images``, ``videos`` and ``audios``, lists
            for each response.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        rewards: Rewards,
        tokenizer: PreTrainedTokenizerBase,
        *,
        shows_media: bool = False,
    ) -> None:
        self.max_steps: int | None = None
        """Last step of the run, a column for rewards; None: no limit."""
        self._shows_media = shows_media
        self._engine = engine
        self._rewards = rewards
        self._tokenizer = tokenizer

    def collect(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        *,
        seeds: Sequence[int],
        step: int,
        phase: Callable[[str], AbstractContextManager[None]],
        weight_version: int | None = None,
        limited: bool = True,
        metrics: Rewards | None = None,
    ) -> Collected:
        """Generate and score ``len(seeds) / len(prompts)`` responses to each prompt.

        Args:
            prompts: Unique prompts.
            sampling: Sampling options.
            seeds: One per response, those of one prompt consecutive.
            step: Training iteration, for records and reward columns.
            phase: Context entered with "generate" and "reward".
            weight_version: Version of the policy, for records where the engine reports none; None:
                ``step``.
            limited: Whether ``max_unscorable_fraction`` applies to these responses alone.
            metrics: Further functions whose values are logged and enter no score.
        """
        num_generations = len(seeds) // len(prompts)
        with phase("generate"):
            rollout = self._engine.generate(
                prompts, sampling, num_generations=num_generations, seeds=seeds
            )
        return self.score(
            prompts,
            rollout,
            sampling,
            step=step,
            phase=phase,
            weight_version=weight_version,
            limited=limited,
            metrics=metrics,
        )

    def score(
        self,
        prompts: PromptBatch,
        rollout: Rollout,
        sampling: Sampling,
        *,
        step: int,
        phase: Callable[[str], AbstractContextManager[None]],
        weight_version: int | None = None,
        limited: bool = True,
        metrics: Rewards | None = None,
    ) -> Collected:
        """Score generated responses; see `collect`."""
        num_generations = len(rollout) // len(prompts)
        groups = [row // num_generations for row in range(len(rollout))]
        with phase("reward"):
            texts = response_texts(prompts, rollout, self._tokenizer, sampling)
            views = response_views(prompts, rollout, texts)
            columns = self._columns(prompts, rollout, step)
            with _scored_episodes(rollout) as further:
                arguments: dict[str, Any] = {
                    "prompts": [view.prompt for view in views],
                    "completions": [view.completion for view in views],
                    "completion_ids": [view.token_ids for view in views],
                    "columns": [
                        {"truncated": cut, **own}
                        for own, cut in zip(columns, rollout.truncated.tolist(), strict=True)
                    ],
                    "group_ids": groups,
                    **further,
                }
                rewards = self._rewards.score(**arguments, limited=limited)
                if metrics is not None:
                    rewards = rewards.with_metrics(metrics.score(**arguments, limited=False))
            rollout = _with_process_rewards(rollout, prompts, rewards, texts, self._tokenizer)
        records = rollout_records(
            prompts,
            rollout,
            views,
            rewards,
            tokenizer=self._tokenizer,
            sampling=sampling,
            step=step,
            weight_version=step if weight_version is None else weight_version,
        )
        return Collected(rollout, rewards, records)

    def _columns(
        self, prompts: PromptBatch, rollout: Rollout, step: int
    ) -> list[Mapping[str, Any]]:
        """Return each response's columns, with the progress of the run and what it shows."""
        copies = len(rollout) // len(prompts)
        media = prompts.media or (None,) * len(prompts)
        columns: list[Mapping[str, Any]] = []
        for row, episode in enumerate(rollout.episodes or (None,) * len(rollout)):
            shown = media[row // copies]
            own = {"step": step, "max_steps": self.max_steps, **prompts.columns[row // copies]}
            if self._shows_media:
                own |= {
                    name: [] if shown is None else list(getattr(shown, name))
                    for name in ("images", "videos", "audios")
                }
                own |= {} if episode is None else {"images": list(episode.images)}
            columns.append(own)
        return columns


@contextmanager
def _scored_episodes(rollout: Rollout) -> Iterator[dict[str, Any]]:
    """Yield what `Rewards.score` gets of episodes; closes their environments at the end."""
    episodes = rollout.episodes
    if episodes is None:
        yield {}
        return
    try:
        yield {
            "on_request": {
                "episodes": episodes,
                "environments": [episode.environment for episode in episodes],
            },
            "failed": {row: one.failure for row, one in enumerate(episodes) if one.failure},
        }
    finally:
        for episode in episodes:
            if episode.release is not None:
                episode.release()


def _with_process_rewards(
    rollout: Rollout,
    prompts: PromptBatch,
    rewards: RewardResult,
    texts: Sequence[CompletionText],
    tokenizer: PreTrainedTokenizerBase,
) -> Rollout:
    """Weight the environments' rewards of turns as the score does, and add rewards of steps."""
    turns = rollout.turn_rewards
    if turns is not None and rewards.turn_weights is not None:
        turns = turns * rewards.turn_weights.to(turns)[:, None]
    if rewards.step_rewards is not None:
        ends = [[step.end for step in steps] for steps in rewards.step_rewards]
        values = torch.zeros(rollout.input_ids.shape)
        columns = text_ends(prompts, rollout, tokenizer, texts, ends)
        for row, (own, steps) in enumerate(zip(columns, rewards.step_rewards, strict=True)):
            for column, step in zip(own, steps, strict=True):
                values[row, column] += step.value
        values = values.to(rollout.input_ids.device)
        turns = values if turns is None else turns + values
    return replace(rollout, turn_rewards=turns)
