"""Prompts in, scored responses out: what training and evaluation of every policy share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from lrlhf.rewards import RewardResult, Rewards
from lrlhf.rollout.engines.engine import RolloutEngine
from lrlhf.rollout.records import completions_for_rewards, response_ids, rollout_records
from lrlhf.rollout.sampling import Sampling
from lrlhf.rollout.texts import response_texts
from lrlhf.types import PromptBatch, Rollout


class Collected(NamedTuple):
    """Responses, what the rewards said of them, and a readable line for each."""

    rollout: Rollout
    rewards: RewardResult
    records: list[dict[str, Any]]


class Collector:
    """Draws responses and has them scored.

    Args:
        engine: Draws the responses; already attached to the policy.
        rewards: Scores them.
        tokenizer: Turns them into text for the rewards and for people.
        shows_media: Give the rewards columns ``images`` and ``videos``, lists for each response.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        rewards: Rewards,
        tokenizer: PreTrainedTokenizerBase,
        *,
        shows_media: bool = False,
    ) -> None:
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
    ) -> Collected:
        """Draw and score ``len(seeds) / len(prompts)`` responses to each prompt.

        Args:
            prompts: Unique prompts.
            sampling: How tokens are drawn.
            seeds: One per response, those of one prompt consecutive.
            step: Written into the records.
            phase: Entered with "generate" and "reward" around the two halves.
        """
        num_generations = len(seeds) // len(prompts)
        with phase("generate"):
            rollout = self._engine.generate(
                prompts, sampling, num_generations=num_generations, seeds=seeds
            )
        return self.score(prompts, rollout, sampling, step=step, phase=phase)

    def score(
        self,
        prompts: PromptBatch,
        rollout: Rollout,
        sampling: Sampling,
        *,
        step: int,
        phase: Callable[[str], AbstractContextManager[None]],
    ) -> Collected:
        """Score responses that were drawn; see `collect`."""
        num_generations = len(rollout) // len(prompts)
        rows = range(len(rollout))
        with phase("reward"):
            ids = response_ids(rollout)
            texts = response_texts(prompts, rollout, self._tokenizer, sampling)
            columns = self._columns(prompts)
            rewards = self._rewards.score(
                prompts=[prompts.prompts[row // num_generations] for row in rows],
                completions=completions_for_rewards(
                    prompts, texts, num_generations=num_generations
                ),
                completion_ids=ids,
                columns=[columns[row // num_generations] for row in rows],
            )
        records = rollout_records(
            prompts, rollout, texts, rewards, tokenizer=self._tokenizer, step=step
        )
        for record in records:
            record["temperature"] = sampling.temperature
        return Collected(rollout, rewards, records)

    def _columns(self, prompts: PromptBatch) -> list[Mapping[str, Any]]:
        """Return each prompt's columns, with what it shows."""
        if not self._shows_media:
            return list(prompts.columns)
        media = prompts.media or (None,) * len(prompts)
        shown = [
            {"images": [], "videos": []}
            if entry is None
            else {"images": list(entry.images), "videos": list(entry.videos)}
            for entry in media
        ]
        return [{**own, **more} for own, more in zip(prompts.columns, shown, strict=True)]
