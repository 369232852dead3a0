"""Prompts in, scored responses out: what training and evaluation of every policy share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.rewards import Completion, CompletionText, RewardResult, Rewards
from lrlhf.rollout.engines.engine import RolloutEngine
from lrlhf.rollout.episodes.scores import scored_episodes, with_turn_rewards
from lrlhf.rollout.records import plain_json, rollout_records
from lrlhf.rollout.sampling import Sampling
from lrlhf.rollout.texts import response_texts, response_views, text_ends
from lrlhf.types import PromptBatch, Rollout


def with_step_rewards(
    rollout: Rollout,
    prompts: PromptBatch,
    rewards: RewardResult,
    texts: Sequence[CompletionText],
    tokenizer: PreTrainedTokenizerBase,
) -> Rollout:
    """Add what rewards found single steps to be worth to what environments gave for turns.

    Args:
        rollout: Responses, rows of one prompt consecutive.
        prompts: The unique prompts.
        rewards: Of the responses.
        texts: Of the responses, as the rewards read them.
        tokenizer: The policy's.
    """
    if rewards.step_rewards is None:
        return rollout
    ends = [[step.end for step in steps] for steps in rewards.step_rewards]
    placed = torch.zeros(rollout.input_ids.shape)
    columns = text_ends(prompts, rollout, tokenizer, texts, ends)
    for row, (own, steps) in enumerate(zip(columns, rewards.step_rewards, strict=True)):
        for column, step in zip(own, steps, strict=True):
            placed[row, column] += step.value
    placed = placed.to(rollout.input_ids.device)
    given = rollout.turn_rewards
    return replace(rollout, turn_rewards=placed if given is None else given + placed)


class Collected(NamedTuple):
    """Responses, what the rewards said of them, and a readable line for each."""

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
    """Has responses generated and scored.

    Args:
        engine: Generates the responses; already attached to the policy.
        rewards: Scores them.
        tokenizer: Turns them into text for the rewards and for people.
        shows_media: Give the rewards columns ``images``, ``videos`` and ``audios``, lists for each
            response.
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
        """Last step of the run, which rewards may ask for; None: it has no end."""
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
            sampling: How tokens are sampled.
            seeds: One per response, those of one prompt consecutive.
            step: Written into the records.
            phase: Entered with "generate" and "reward" around the two halves.
            weight_version: Of the policy, for the records where the engine tells none; None:
                ``step``.
            limited: Whether ``max_unscorable_fraction`` holds for these responses by themselves.
            metrics: Further functions whose values are told and enter no score.
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
        """Score responses that were generated; see `collect`."""
        num_generations = len(rollout) // len(prompts)
        groups = [row // num_generations for row in range(len(rollout))]
        with phase("reward"):
            texts = response_texts(prompts, rollout, self._tokenizer, sampling)
            views = response_views(prompts, rollout, texts)
            columns = self._columns(prompts, step)
            with scored_episodes(rollout) as further:
                asked: dict[str, Any] = {
                    "prompts": [view.prompt for view in views],
                    "completions": [view.completion for view in views],
                    "completion_ids": [view.token_ids for view in views],
                    "columns": [
                        {"truncated": cut, **columns[group]}
                        for group, cut in zip(groups, rollout.truncated.tolist(), strict=True)
                    ],
                    "group_ids": groups,
                    **further,
                }
                rewards = self._rewards.score(**asked, limited=limited)
                if metrics is not None:
                    rewards = rewards.with_metrics(metrics.score(**asked, limited=False))
            rollout = with_turn_rewards(rollout, rewards)
            rollout = with_step_rewards(rollout, prompts, rewards, texts, self._tokenizer)
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

    def _columns(self, prompts: PromptBatch, step: int) -> list[Mapping[str, Any]]:
        """Return each prompt's columns, with how far the run is, and what the prompt shows."""
        progress = {"step": step, "max_steps": self.max_steps}
        columns = [{**progress, **own} for own in prompts.columns]
        if not self._shows_media:
            return list(columns)
        media = prompts.media or (None,) * len(prompts)
        return [
            {
                **own,
                "images": [] if shown is None else list(shown.images),
                "videos": [] if shown is None else list(shown.videos),
                "audios": [] if shown is None else list(shown.audios),
            }
            for own, shown in zip(columns, media, strict=True)
        ]


def _completions(
    prompts: PromptBatch, rollout: Rollout, texts: Sequence[CompletionText]
) -> list[Completion]:
    """Return what rewards read of responses."""
    return [view.completion for view in response_views(prompts, rollout, texts)]
