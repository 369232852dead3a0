"""From prompts to scored responses: generated now, ahead of time, or by an earlier run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from torch import Tensor

from lrlhf.datamodules.rows.chat import ChatFormat
from lrlhf.datamodules.text import TextDataModule
from lrlhf.modules.metrics.constant_rewards import ConstantRewards
from lrlhf.modules.metrics.rollout_metrics import measure_rollout
from lrlhf.modules.policy.experience import Sample, score_columns
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.load_policy import LoadedPolicy
from lrlhf.modules.policy.policy_settings import PolicySettings
from lrlhf.modules.policy.sampler_checks import (
    check_beside,
    check_compared,
    check_engine,
    check_evaluation,
    check_generating_ahead,
)
from lrlhf.modules.policy.stored_rollouts import as_collected, check_stored
from lrlhf.modules.policy.teaching_groups import teaching_groups
from lrlhf.rewards import Rewards
from lrlhf.rollout import (
    Collected,
    Collector,
    RolloutEngine,
    RolloutQueue,
    Sampling,
    collect_different,
)
from lrlhf.run import sample_seeds
from lrlhf.run.seeding import last_step, model_step
from lrlhf.types import PromptBatch, Rollout, StoredRollout

_BESIDE_STREAM = 1_000_033
"""Keeps the random numbers of what is sampled beside the responses apart from theirs."""


@runtime_checkable
class LooksAhead(Protocol):
    """A loader that knows its next batches before it is asked for them."""

    def upcoming(self, skip: int = 0) -> PromptBatch:
        """Return the batch after the next ``skip`` ones, and leave the position where it is."""
        ...


class Sampler:
    """Generates responses and has them scored.

    Args:
        policy: What generates, and what reads the prompts.
        engine: How it generates.
        rewards: What scores the responses.
        settings: Of the run.
        seed: Seeds the responses, together with step and prompt.
        metrics: What is measured of responses in evaluations only.

    Raises:
        ValueError: The engine cannot do what the settings ask for, or the rewards compare
            responses of which there is one.
    """

    def __init__(
        self,
        policy: LoadedPolicy,
        engine: RolloutEngine,
        rewards: Rewards,
        settings: PolicySettings,
        *,
        seed: int,
        metrics: Rewards | None = None,
    ) -> None:
        self._metrics = metrics
        self._policy = policy
        self._engine = engine
        self._rewards = rewards
        self._settings = settings
        self._seed = seed
        self._ready = False
        self._constant = ConstantRewards()
        check_engine(engine, settings)
        check_generating_ahead(settings, rewards)
        check_compared(rewards, settings.num_generations)
        check_beside(rewards, settings.algorithm.beside)
        self._collector = Collector(
            engine, rewards, policy.tokenizer, shows_media=policy.processor is not None
        )
        self._queue = (
            RolloutQueue(engine, settings.max_staleness) if settings.max_staleness else None
        )

    # ---- training

    def sample(self, batch: PromptBatch | StoredRollout, it: Iteration) -> Sample:
        """Return scored responses to a batch of prompts, or the stored ones of an earlier run.

        Args:
            batch: Prompts of this rank, or what an earlier iteration stored.
            it: The iteration; measures the responses.
        """
        stored = isinstance(batch, StoredRollout) and not batch.as_recorded
        if isinstance(batch, StoredRollout):
            self._check_stored(batch, it)
            trained, filler = as_collected(batch, step=it.number)
            measured = trained
        elif self._settings.dynamic_sampling is not None:
            trained, filler, measured = self._sample_until_different(batch, it)
        else:
            trained = measured = self._sample_batch(batch, it)
            filler = torch.zeros_like(trained.rollout.truncated)
        if not stored:
            _measure_age(trained.rollout, it)
        measure_rollout(
            measured.rollout,
            measured.rewards,
            it.metrics,
            num_generations=self._settings.num_generations,
            teaches=self._teaches(measured),
        )
        if isinstance(batch, PromptBatch):
            chats = any(not isinstance(prompt, str) for prompt in batch.prompts)
            self._constant.observe(measured.rewards, chats=chats)
        self._engine.sleep()
        return _as_sample(trained, filler, stored=stored)

    def _check_stored(self, batch: StoredRollout, it: Iteration) -> None:
        settings = self._settings
        if settings.dynamic_sampling is not None:
            raise ValueError(
                "dynamic_sampling generates responses, but the data holds stored ones: drop "
                "dynamic_sampling, or train on prompts"
            )
        check_stored(
            batch,
            num_generations=settings.num_generations,
            sampling=settings.sampling,
            allow_truncated_sampling=settings.allow_truncated_sampling,
            beside=settings.algorithm.beside,
            step=it.number,
            holds_copy=self._engine.capabilities.holds_copy,
        )

    def _teaches(self, collected: Collected) -> Tensor:
        settings = self._settings
        return teaching_groups(
            collected,
            settings.algorithm,
            settings.advantage,
            num_generations=settings.num_generations,
        )

    def _sample_batch(self, batch: PromptBatch, it: Iteration) -> Collected:
        if self._queue is not None:
            return self._sample_from_queue(self._queue, batch, it)
        return self._sample_part(batch, it.ranks.rank * len(batch), it)

    def _sample_part(self, prompts: PromptBatch, first: int, it: Iteration) -> Collected:
        """Generate and score the responses to some prompts, and what belongs beside them.

        Args:
            prompts: Of this rank.
            first: Number of the first one among those of all ranks.
            it: The iteration.
        """
        settings = self._settings
        seeds = self._seeds(first, len(prompts), it.step)
        collected = self._generate(prompts, settings.sampling, seeds, it)
        beside: dict[str, Tensor] = {}
        for number, (name, options) in enumerate(settings.algorithm.beside.items()):
            plain = replace(settings.sampling, first_temperature=None, first_top_k=0)
            sampling = replace(plain, **options)
            stream = _BESIDE_STREAM + number
            seeds = [
                sample_seeds(self._seed, it.step, stream, first + row, count=1)[0]
                for row in range(len(prompts))
            ]
            # so few rows say nothing of how many cannot be scored
            alone = self._generate(prompts, sampling, seeds, it, limited=False)
            beside[name] = alone.rewards.scores.repeat_interleave(settings.num_generations)
        return collected.with_beside(beside) if beside else collected

    def _sample_until_different(
        self, batch: PromptBatch, it: Iteration
    ) -> tuple[Collected, Tensor, Collected]:
        """Sample in rounds, see `DynamicSampling`.

        Returns:
            What is trained on, `[B]` which rows only fill it up, and everything that was sampled.
        """
        settings = self._settings
        assert settings.dynamic_sampling is not None
        offset = it.ranks.rank * len(batch)
        filtered = collect_different(
            batch,
            lambda prompts, first: self._sample_part(prompts, offset + first, it),
            wanted=settings.dynamic_sampling.prompts,
            teaches=self._teaches,
            num_generations=settings.num_generations,
            any_rank=it.ranks.any,
        )
        filler = filtered.filler
        it.metrics.add("rollout/rounds", filtered.rounds, 1.0)
        it.metrics.add("rollout/filler_fraction", filler.sum(), float(len(filler)))
        for record, fills in zip(filtered.collected.records, filler.tolist(), strict=True):
            record["filler"] = fills
        return filtered.collected, filler, filtered.everything

    def _sample_from_queue(
        self, queue: RolloutQueue, batch: PromptBatch, it: Iteration
    ) -> Collected:
        """Take the responses that were generated ahead, and have the next ones generated."""
        settings = self._settings
        size = settings.num_generations
        if queue.updates_in_flight:
            # what is in the making goes on with the new weights, and the engine never waits
            self._prepare(it)
            if it.step not in queue:
                self._start(queue, it.step, batch, it)
            self._look_ahead(queue, it)
        with it.phase("generate"):
            rollout = queue.take(it.step, batch, num_generations=size, any_rank=it.ranks.any)
        self._prepare(it)
        if rollout is None:
            seeds = self._seeds(it.ranks.rank * len(batch), len(batch), it.step)
            with it.phase("generate"):
                rollout = self._engine.generate(
                    batch, settings.sampling, num_generations=size, seeds=seeds
                )
        # once more where updates are in flight: `take` drops later batches that failed, to be begun
        self._look_ahead(queue, it)
        return self._collector.score(
            batch,
            rollout,
            settings.sampling,
            step=it.number,
            phase=it.phase,
            weight_version=it.step,
        )

    def _look_ahead(self, queue: RolloutQueue, it: Iteration) -> None:
        """Begin what may be begun with the engine's weights and has not been."""
        last = min(it.step + queue.max_staleness, it.trainer.estimated_stepping_batches - 1)
        for step in range(it.step + 1, int(last) + 1):
            if step not in queue:
                self._start(queue, step, _upcoming_batch(it, skip=step - it.step - 1), it)

    def _start(self, queue: RolloutQueue, step: int, prompts: PromptBatch, it: Iteration) -> None:
        settings = self._settings
        queue.start(
            step,
            prompts,
            settings.sampling,
            num_generations=settings.num_generations,
            seeds=self._seeds(it.ranks.rank * len(prompts), len(prompts), step),
        )

    def _seeds(self, first_prompt: int, prompts: int, step: int) -> list[int]:
        """One seed per response, whichever rank generates it."""
        return [
            seed
            for row in range(first_prompt, first_prompt + prompts)
            for seed in sample_seeds(self._seed, step, row, count=self._settings.num_generations)
        ]

    # ---- evaluation

    def check_evaluations(self, *, answers_once: bool) -> None:
        """Refuse evaluations that could not be scored, before an iteration is spent.

        Raises:
            ValueError: See `check_evaluation`.
        """
        for functions in (self._rewards, self._metrics):
            if functions is not None:
                check_evaluation(functions, self._settings, answers_once=answers_once)

    def answer(
        self, batch: PromptBatch, sampling: Sampling, seeds: Sequence[int], it: Iteration
    ) -> Collected:
        """Answer held-out prompts, each as often as there are seeds for it, and score that."""
        return self._generate(batch, sampling, seeds, it, evaluated=model_step(it.trainer))

    # ---- the engine

    def _generate(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        seeds: Sequence[int],
        it: Iteration,
        *,
        evaluated: int | None = None,
        limited: bool = True,
    ) -> Collected:
        """Generate for training or, at step ``evaluated``, for an evaluation."""
        self._prepare(it, evaluates=evaluated is not None)
        return self._collector.collect(
            prompts,
            sampling,
            seeds=seeds,
            step=it.number if evaluated is None else evaluated,
            phase=it.phase,
            weight_version=it.step if evaluated is None else evaluated,
            limited=limited,
            metrics=None if evaluated is None else self._metrics,
        )

    def _prepare(self, it: Iteration, *, evaluates: bool = False) -> None:
        if not self._ready:
            # not before it is needed: stored rollouts are trained on without engine and rewards
            self._engine.attach(*self._policy)
            self._engine.use_chat(chat_of(it.trainer, self._policy))
            self._rewards.prepare()
            self._collector.max_steps = last_step(it.trainer)
            if self._queue is not None and self._queue.updates_in_flight:
                self._engine.allow_updates_in_flight(True)
            self._ready = True
        if evaluates and self._metrics is not None:
            self._metrics.prepare()  # nothing that is there already
        if self._queue is not None and (evaluates or not self._queue.updates_in_flight):
            # no weights may change under responses in the making, here or on another rank: never
            # to those of an evaluation, which may be averaged ones
            self._queue.wait()
            it.ranks.any(False)
        if self._engine.capabilities.holds_copy:
            it.request_weights()

    def reset(self) -> None:
        """Attach the engine anew before it is used next: a new trainer has come."""
        if self._queue is not None:
            # what a run that broke off has begun comes from other weights of the same number
            self._queue.drop()
        self._ready = False

    def close(self) -> None:
        """Drop what was generated ahead, and give back what engine and rewards hold."""
        if self._queue is not None:
            if self._queue.updates_in_flight:
                self._engine.close()  # which ends what is in the making: it may be much
            self._queue.drop()
        self._engine.close()
        self._rewards.close()
        if self._metrics is not None:
            self._metrics.close()

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what was generated ahead.

        A checkpoint is rank 0's: of several ranks the others would miss their responses.
        """
        alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
        kept = self._queue.state_dict() if self._queue is not None and alone else None
        return {"queue": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what was generated ahead."""
        kept = state.get("queue")
        if self._queue is not None and kept is not None:
            self._queue.load_state_dict(kept, torch.device("cpu"))


def _as_sample(collected: Collected, filler: Tensor, *, stored: bool) -> Sample:
    # environments are closed by now, and no tensor depends on what they said
    rollout, rewards = replace(collected.rollout, episodes=None), collected.rewards
    device = rollout.input_ids.device
    columns = score_columns(collected)
    return Sample(
        rollout,
        rewards.scores.to(device).float(),
        {name: column.to(device).float() for name, column in columns.items()},
        filler,
        collected.records,
        stored,
    )


def chat_of(trainer: L.Trainer, policy: LoadedPolicy) -> ChatFormat:
    """Return how the data renders chats; of foreign data: as the policy's tokenizer has it."""
    datamodule = getattr(trainer, "datamodule", None)
    if isinstance(datamodule, TextDataModule):
        return datamodule.reader(trainer).chat
    return ChatFormat(policy.tokenizer)


def _upcoming_batch(it: Iteration, *, skip: int) -> PromptBatch:
    loader = it.trainer.train_dataloader
    if not isinstance(loader, LooksAhead):
        raise ValueError(
            f"max_staleness needs to know the next batches, and a {type(loader).__name__} does "
            "not tell them: use PromptDataModule, or give the loader a method upcoming(skip)"
        )
    return loader.upcoming(skip).to(it.device)


def _measure_age(rollout: Rollout, it: Iteration) -> None:
    """Count the iterations between the weights that sampled each token and the present ones."""
    if rollout.versions is None:
        return
    ages = (it.step - rollout.versions)[rollout.response_mask].double()
    it.metrics.add_values("sync/age", ages)
    if len(ages):
        it.metrics.maximum("sync/age_max", ages.max())
