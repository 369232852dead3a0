"""From prompts to scored responses: drawn now, or ahead of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.media import MediaProcessor
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.metrics.rollout_metrics import measure_rollout
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.objective import trained_scores
from lrlhf.modules.policy.policy_experience import PolicyExperience
from lrlhf.modules.policy.stored_rollouts import as_collected
from lrlhf.modules.settings import DynamicSampling
from lrlhf.rewards import Rewards
from lrlhf.rollout import (
    Collected,
    Collector,
    Filtered,
    RolloutAhead,
    Sampling,
    SyncedEngine,
    collect_different,
)
from lrlhf.run import Collectives, sample_seeds
from lrlhf.types import PromptBatch, StoredRollout

_EVAL_STREAM = 1_000_003
"""Keeps the random numbers of validation apart from those of any training step."""


@runtime_checkable
class LooksAhead(Protocol):
    """A loader that knows its next batch before it is asked for."""

    def upcoming(self) -> PromptBatch:
        """Return the next batch, and leave the position where it is."""
        ...


class PolicyRollout(PolicyExperience):
    """The part of `PolicyModule` that has responses drawn and scored."""

    tokenizer: PreTrainedTokenizerBase
    processor: MediaProcessor | None
    rewards: Rewards
    eval_sampling: Sampling
    rollout_ahead: int
    dynamic_sampling: DynamicSampling | None
    seed: int
    _collector: Collector
    _ahead: RolloutAhead | None
    _iteration: Iteration
    _ready: bool

    def _check_engine(self) -> None:
        """Refuse responses whose probabilities could not be compared with the policy's."""
        if self.sampling.truncates and isinstance(self.engine, SyncedEngine):
            raise ValueError(
                f"sampling.top_p, top_k, min_p or min_new_tokens cuts tokens off, and "
                f"{type(self.engine).__name__} does not tell how much probability that was, so its "
                "log-probabilities do not compare with the policy's: set them to 1.0, 0, 0.0 and "
                "0, or take lrlhf.rollout.TransformersEngine (eval_sampling may cut)"
            )

    def _look_ahead(self) -> RolloutAhead:
        if not (isinstance(self.engine, SyncedEngine) and self.engine.concurrent):
            raise ValueError(
                f"rollout_ahead is {self.rollout_ahead}, but model.engine is "
                f"{type(self.engine).__name__}, which computes in the training process: set "
                "rollout_ahead: 0, or take lrlhf.rollout.VLLMServerEngine"
            )
        if self.dynamic_sampling is not None:
            raise ValueError(
                "rollout_ahead draws responses before the present ones are scored, and "
                "dynamic_sampling decides by scores how many to draw: drop one of the two"
            )
        return RolloutAhead(self.engine)

    def _responses(
        self, batch: PromptBatch | StoredRollout, metrics: MetricSums, collectives: Collectives
    ) -> tuple[Collected, Tensor | None]:
        """Draw responses, or take the stored ones; with the rows that only fill the batch."""
        if isinstance(batch, StoredRollout):
            collected, filler = as_collected(batch, step=self.global_step)
            drawn = collected
        else:
            filtered = self._draw_all(batch, collectives)
            collected, filler, drawn = filtered.collected, filtered.filler, filtered.drawn
            if self.dynamic_sampling is not None:
                metrics.add("rollout/rounds", filtered.rounds, 1.0)
                metrics.add("rollout/filler_fraction", filler.sum(), float(len(filler)))
                for record, fills in zip(collected.records, filler.tolist(), strict=True):
                    record["filler"] = fills
            version = collected.rollout.weight_version
            if version is not None:
                metrics.add_values("sync/age", (self.global_step - version).double())
        measure_rollout(drawn.rollout, drawn.rewards, metrics, num_generations=self.num_generations)
        return collected, filler

    def _draw_all(self, batch: PromptBatch, collectives: Collectives) -> Filtered:
        def draw(prompts: PromptBatch, first: int) -> Collected:
            seeds = self._seeds(collectives.rank * len(batch) + first, len(prompts))
            return self._draw(prompts, self.sampling, seeds)

        if self.dynamic_sampling is None:
            if self._ahead is not None:
                collected = self._draw_with_ahead(self._ahead, batch, collectives)
            else:
                collected = draw(batch, 0)
            nothing = torch.zeros_like(collected.rollout.truncated)
            return Filtered(collected, nothing, collected, 1, len(batch))
        return collect_different(
            batch,
            draw,
            wanted=self.dynamic_sampling.prompts,
            scores_of=lambda collected: trained_scores(collected, self.advantage),
            num_generations=self.num_generations,
            any_rank=collectives.any,
        )

    def _seeds(self, first_prompt: int, prompts: int, *, step: int | None = None) -> list[int]:
        """One seed per response, whichever rank draws it; ``step`` is the present one if None."""
        step = self.global_step if step is None else step
        return [
            seed
            for row in range(first_prompt, first_prompt + prompts)
            for seed in sample_seeds(self.seed, step, row, count=self.num_generations)
        ]

    def _draw(self, prompts: PromptBatch, sampling: Sampling, seeds: Sequence[int]) -> Collected:
        self._prepare_engine()
        return self._collector.collect(
            prompts, sampling, seeds=seeds, step=self.global_step, phase=self._iteration.phase
        )

    def _prepare_engine(self) -> None:
        if not self._ready:
            # not before it is needed: stored rollouts are trained on without engine and rewards
            self.engine.attach(self.policy, self.tokenizer, self.processor)
            self.rewards.prepare()
            self._ready = True
        if self._ahead is not None:
            # no weights may change under responses that are being drawn, here or on another rank
            self._ahead.wait()
            Collectives(self.trainer).any(False)
        if isinstance(self.engine, SyncedEngine):
            self._iteration.tell_weights_needed()

    def _draw_with_ahead(
        self, ahead: RolloutAhead, batch: PromptBatch, collectives: Collectives
    ) -> Collected:
        """Take the responses that were drawn ahead, and have the next ones drawn."""
        with self._iteration.phase("generate"):
            rollout = ahead.take(
                self.global_step,
                batch,
                num_generations=self.num_generations,
                any_rank=collectives.any,
            )
        self._prepare_engine()
        if rollout is None:
            seeds = self._seeds(collectives.rank * len(batch), len(batch))
            with self._iteration.phase("generate"):
                rollout = self.engine.generate(
                    batch, self.sampling, num_generations=self.num_generations, seeds=seeds
                )
        if self.global_step + 1 < self.trainer.estimated_stepping_batches:
            upcoming = self._upcoming_batch()
            ahead.start(
                self.global_step + 1,
                upcoming,
                self.sampling,
                num_generations=self.num_generations,
                seeds=self._seeds(
                    collectives.rank * len(upcoming), len(upcoming), step=self.global_step + 1
                ),
            )
        return self._collector.score(
            batch,
            rollout,
            self.sampling,
            step=self.global_step,
            phase=self._iteration.phase,
        )

    def _upcoming_batch(self) -> PromptBatch:
        loader = self.trainer.train_dataloader
        if not isinstance(loader, LooksAhead):
            raise ValueError(
                f"rollout_ahead needs to know the next batch, and a {type(loader).__name__} does "
                "not tell it: use PromptDataModule, or give the loader a method upcoming()"
            )
        return loader.upcoming().to(self.device)

    def _answer(self, batch: PromptBatch, batch_idx: int) -> Collected:
        position = batch_idx * self.trainer.world_size + self.trainer.global_rank
        seeds = sample_seeds(self.seed, _EVAL_STREAM, position, count=len(batch))
        return self._draw(batch, self.eval_sampling, seeds)
