"""From prompts to scored responses: generated now, ahead of time, or by an earlier run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lrlhf.datamodules.rows.chat import ChatFormat
from lrlhf.datamodules.text import TextDataModule
from lrlhf.functional.algorithm import Algorithm
from lrlhf.functional.turns import turn_numbers, turn_sums
from lrlhf.media import MediaOptions
from lrlhf.modules.metrics.rollout_metrics import ConstantRewards, FirstResponses, measure_rollout
from lrlhf.modules.policy.experience import (
    SHOWN_OBSERVATIONS,
    as_experience,
    compute_advantages,
    score_columns,
    trained_scores,
)
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.load_policy import LoadedPolicy
from lrlhf.modules.policy.settings import PolicySettings
from lrlhf.modules.settings import Advantage
from lrlhf.rewards import RewardResult, Rewards
from lrlhf.rewards.lookup import comparing
from lrlhf.rollout import (
    Collected,
    Collector,
    RolloutEngine,
    RolloutQueue,
    Sampling,
    collect_different,
    extra_values_of,
    groups_differ,
)
from lrlhf.rollout.engines.engine import check_format
from lrlhf.run import sample_seeds
from lrlhf.run.seeding import last_step, model_step
from lrlhf.types import Experience, PromptBatch, Rollout, StoredRollout

_EXTRA_STREAM = 1_000_033
"""Keeps the random numbers of extra samples apart from those of the responses."""


@runtime_checkable
class HasUpcoming(Protocol):
    """A loader that knows its next batches before it is asked for them."""

    def upcoming(self, skip: int = 0) -> PromptBatch:
        """Return the batch after the next ``skip`` ones, and leave the position where it is."""
        ...


@runtime_checkable
class HasObserve(Protocol):
    """A loader that draws prompts by what the responses to earlier ones have scored."""

    def observe(
        self, scores: Float[Tensor, "P G"], gather: Callable[[Any], list[Any]]
    ) -> dict[str, float]: ...


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
        self._sampling = replace(
            settings.sampling,
            keep_mask=settings.keeps_mask,
            keep_experts=settings.update.replay_routing,
        )
        """Of training."""
        self._seed = seed
        self._ready = False
        self._constant = ConstantRewards()
        taught = settings.teacher is not None
        self._first = FirstResponses(settings.sampling.max_new_tokens, taught=taught)
        check_engine(engine, settings)
        check_generating_ahead(settings, rewards)
        check_compared(rewards, settings.num_generations)
        check_extra_samples(rewards, settings.algorithm.extra_samples)
        self._collector = Collector(
            engine, rewards, policy.tokenizer, shows_media=policy.processor is not None
        )
        self._queue = (
            RolloutQueue(engine, settings.max_staleness) if settings.max_staleness else None
        )

    # ---- training

    def sample(self, batch: PromptBatch | StoredRollout, it: Iteration) -> Experience:
        """Return scored responses to a batch of prompts, or the stored ones of an earlier run.

        Args:
            batch: Prompts of this rank, or what an earlier iteration stored.
            it: The iteration; measures the responses, and gets their records.
        """
        stored = isinstance(batch, StoredRollout) and not batch.as_recorded
        shows = isinstance(batch, PromptBatch) and batch.media is not None and any(batch.media)
        if shows and self._settings.algorithm.estimator.uses_observations:
            raise ValueError(SHOWN_OBSERVATIONS)
        if isinstance(batch, StoredRollout):
            self._check_stored(batch, it)
            trained, padding_rows = as_collected(batch, step=it.number)
            measured = trained
        elif self._settings.dynamic_sampling is not None:
            trained, padding_rows, measured = self._sample_until_different(batch, it)
        else:
            trained = measured = self._sample_batch(batch, it)
            padding_rows = torch.zeros_like(trained.rollout.truncated)
        if isinstance(batch, PromptBatch) and self._settings.keeps_mask:
            _check_mask(trained.rollout, self._engine)
        if not stored:
            _measure_age(trained.rollout, it)
        informative, size = self._informative(measured), self._settings.num_generations
        measure_rollout(
            measured.rollout,
            measured.rewards,
            it.metrics,
            num_generations=size,
            informative=informative,
        )
        if isinstance(batch, PromptBatch):
            self._first.observe(measured.rollout.truncated, informative, num_generations=size)
            chats = any(not isinstance(prompt, str) for prompt in batch.prompts)
            self._constant.observe(measured.rewards, chats=chats)
            if isinstance(loader := it.trainer.train_dataloader, HasObserve):
                scores = measured.rewards.scores.view(-1, size)
                for name, value in loader.observe(scores, it.ranks.gather).items():
                    it.metrics.add(name, value, 1.0)
        self._engine.sleep()
        it.records = trained.records
        # environments are closed by now, and no tensor depends on what they said
        experts = _experts(trained.rollout) if self._settings.update.replay_routing else None
        rollout = replace(trained.rollout, episodes=None, routed_experts=experts)
        device = rollout.input_ids.device
        columns = score_columns(trained)
        experience = as_experience(
            rollout,
            scores=trained.rewards.scores.to(device),
            columns={name: column.to(device).float() for name, column in columns.items()},
            padding_rows=padding_rows,
        )
        return replace(experience, old_source="recorded") if stored else experience

    def _check_stored(self, batch: StoredRollout, it: Iteration) -> None:
        settings = self._settings
        if settings.dynamic_sampling is not None:
            raise ValueError(
                "dynamic_sampling generates responses, but the data holds stored ones: drop "
                "dynamic_sampling, or train on prompts"
            )
        if settings.importance.rejection and not batch.as_recorded:
            raise ValueError(
                "importance_sampling rejects where engine and trainer are far apart, and stored "
                "rollouts are trained on from the engine's log-probabilities, without such "
                "weights: drop reject and presets of mode, or set data.as_recorded"
            )
        check_stored(
            batch,
            num_generations=settings.num_generations,
            sampling=settings.sampling,
            allow_truncated_sampling=settings.allow_truncated_sampling,
            extra_samples=settings.algorithm.extra_samples,
            step=it.number,
            holds_copy=self._engine.capabilities.holds_copy,
        )

    def _informative(self, collected: Collected) -> Tensor:
        settings = self._settings
        return informative_groups(
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
        """Generate and score the responses to some prompts, and the algorithm's extra samples.

        Args:
            prompts: Of this rank.
            first: Number of the first one among those of all ranks.
            it: The iteration.
        """
        settings = self._settings
        seeds = self._seeds(first, len(prompts), it.step)
        collected = self._generate(prompts, self._sampling, seeds, it)
        extra: dict[str, Tensor] = {}
        for number, (name, options) in enumerate(settings.algorithm.extra_samples.items()):
            plain = replace(settings.sampling, first_temperature=None, first_top_k=0)
            sampling = replace(plain, **options)
            stream = _EXTRA_STREAM + number
            seeds = [
                sample_seeds(self._seed, it.step, stream, first + row, count=1)[0]
                for row in range(len(prompts))
            ]
            # so few rows say nothing of how many cannot be scored
            alone = self._generate(prompts, sampling, seeds, it, limited=False)
            extra[name] = alone.rewards.scores.repeat_interleave(settings.num_generations)
        return collected.with_extra_values(extra) if extra else collected

    def _sample_until_different(
        self, batch: PromptBatch, it: Iteration
    ) -> tuple[Collected, Tensor, Collected]:
        """Dynamic sampling: sample in rounds, see `lrlhf.rollout.dynamic_sampling`.

        Returns:
            What is trained on, `[B]` which rows only fill it up, and everything that was sampled.
        """
        settings = self._settings
        assert settings.dynamic_sampling is not None
        offset = it.ranks.rank * len(batch)
        filtered = collect_different(
            batch,
            lambda prompts, first: self._sample_part(prompts, offset + first, it),
            count=settings.dynamic_sampling.prompts,
            informative=self._informative,
            num_generations=settings.num_generations,
            any_rank=it.ranks.any,
        )
        padding_rows = filtered.padding_rows
        it.metrics.add("rollout/rounds", filtered.rounds, 1.0)
        it.metrics.add(
            "rollout/padding_rows_fraction", padding_rows.sum(), float(len(padding_rows))
        )
        for record, fills in zip(filtered.collected.records, padding_rows.tolist(), strict=True):
            record["padding"] = fills
        return filtered.collected, padding_rows, filtered.everything

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
                    batch, self._sampling, num_generations=size, seeds=seeds
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
            self._sampling,
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
            self._engine.use_chat(*chat_of(it.trainer, self._policy))
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
        """Drop what was generated ahead, and release what engine and rewards hold."""
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
        queued = self._queue.state_dict() if self._queue is not None and alone else None
        return {"queue": queued}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what was generated ahead."""
        queued = state.get("queue")
        if self._queue is not None and queued is not None:
            self._queue.load_state_dict(queued, torch.device("cpu"))


def chat_of(trainer: L.Trainer, policy: LoadedPolicy) -> tuple[ChatFormat, MediaOptions]:
    """Return how the data render chats and read images.

    Of foreign data: as the policy's tokenizer has it.
    """
    datamodule = getattr(trainer, "datamodule", None)
    if isinstance(datamodule, TextDataModule):
        reader = datamodule.reader(trainer)
        return reader.chat, reader.media.options
    return ChatFormat(policy.tokenizer), MediaOptions()


def _upcoming_batch(it: Iteration, *, skip: int) -> PromptBatch:
    loader = it.trainer.train_dataloader
    if not isinstance(loader, HasUpcoming):
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


_ROUNDED = 1e-10
"""Of the largest score: what rounding may leave of float64 numbers that are equal."""


@torch.no_grad()
def informative_groups(
    collected: Collected,
    algorithm: Algorithm,
    settings: Advantage,
    *,
    num_generations: int,
) -> Bool[Tensor, " P"]:
    """Return which groups have responses that the algorithm learns from.

    An estimator that compares scores, or has extra samples for a baseline, is asked itself: a group
    is informative if one of its tokens has an advantage. One that looks at single rewards learns
    from groups in which any of them differs. Others learn something of any response; of their
    groups those are informative whose scores differ, or what the turns of their responses have
    earned, where they look at turns. KL penalties and teachers are left out, as they say nothing of
    the prompt.

    Args:
        collected: Responses and their rewards, rows of one prompt consecutive.
        algorithm: That is trained with.
        settings: What is clipped, who is left out, and whether turns have rewards of their own.
        num_generations: Responses per prompt.
    """
    estimator, rollout = algorithm.estimator, collected.rollout
    compares = estimator.groups or bool(algorithm.extra_samples)
    if estimator.uses_values or estimator.uses_rewards or not compares:
        scores = trained_scores(collected, settings, single=estimator.uses_rewards)
        turns = _turns(rollout) if estimator.uses_turn_rewards else None
        if turns is not None and settings.credit != "response":
            left_out = scores.isnan().all(dim=1, keepdim=True)
            scores = torch.cat([scores, turns.to(scores).masked_fill(left_out, torch.nan)], dim=1)
        return groups_differ(scores, num_generations)
    device = rollout.input_ids.device
    experience = as_experience(
        rollout,
        scores=collected.rewards.scores.to(device),
        # what is not known yet, as if there were no difference
        old_logprobs=rollout.sampling_logprobs,
        ref_logprobs=rollout.sampling_logprobs,
    )
    exact: dict[str, Any] = {"scores": experience.scores.double()}
    if rollout.turn_rewards is not None:
        exact["turn_rewards"] = rollout.turn_rewards.double()
    columns: Mapping[str, Tensor] = {
        name: column.to(device).double() for name, column in score_columns(collected).items()
    }
    experience = compute_advantages(
        replace(experience, **exact),
        algorithm=algorithm,
        settings=replace(settings, clip=None),
        reward_kl_estimator=None,
        kl_coef=0.0,
        num_generations=num_generations,
        whiten=lambda values, mask, eps: values,
        columns=columns,
    )
    advantages = (experience.advantages * experience.loss_mask).abs().amax(dim=1)
    largest = torch.stack([experience.scores.abs(), *(c.abs() for c in columns.values())])
    least = _ROUNDED * largest.nan_to_num(nan=0.0, posinf=0.0).amax(dim=0)
    return (advantages > least).view(-1, num_generations).any(dim=1)


def _turns(rollout: Rollout) -> Tensor | None:
    """`[B, K]`: what each turn has earned; None: nothing was earned in turns."""
    if rollout.turn_rewards is None:
        return None
    return turn_sums(rollout.turn_rewards, turn_numbers(rollout.response_mask))


def check_stored(
    stored: StoredRollout,
    *,
    num_generations: int,
    sampling: Sampling,
    allow_truncated_sampling: bool,
    extra_samples: Iterable[str] = (),
    step: int,
    holds_copy: bool,
) -> None:
    """Check that a stored rollout was sampled as this run would have sampled it.

    Args:
        stored: Of an earlier iteration.
        num_generations: Responses per prompt of this run.
        sampling: Of this run.
        allow_truncated_sampling: Whether responses may come from top_p, top_k, min_p
            or min_new_tokens.
        extra_samples: Of the algorithm, whose scores it needs.
        step: The iteration that it is trained on in.
        holds_copy: Whether this run's engine has a copy of the weights.

    Raises:
        ValueError: It was not; says which option differs.
    """
    ids = stored.rollout.group_ids
    complete = len(ids) % num_generations == 0
    groups = ids.view(-1, num_generations) if complete else ids[:, None]
    starts = groups[:, 0]
    if not (complete and (groups == starts[:, None]).all() and (starts[1:] != starts[:-1]).all()):
        sizes = sorted(set(torch.unique_consecutive(ids, return_counts=True)[1].tolist()))
        raise ValueError(
            f"num_generations is {num_generations}, but the stored rollout has groups of "
            f"{' and '.join(map(str, sizes))} responses; set it as in the run that stored them"
        )
    sampled_at = stored.records[0].get("temperature", sampling.temperature)
    if sampled_at != sampling.temperature:
        raise ValueError(
            f"sampling.temperature is {sampling.temperature}, but the stored rollout was sampled "
            f"at {sampled_at}: the log-probabilities do not compare; set it to {sampled_at}"
        )
    if stored.as_recorded:
        _check_recorded(stored, step=step, holds_copy=holds_copy)
    for name in extra_samples:
        if name not in stored.records[0].get("extra_values", {}):
            raise ValueError(
                f"the algorithm compares with the score of {name!r}, which the stored rollout has "
                "not: store it with the same algorithm, or choose another one"
            )
    if stored.rollout.kept_mass is not None:
        unbiased = stored.rollout.sampling_mask is not None
        _check_drawn(stored.records[0], sampling, allowed=unbiased or allow_truncated_sampling)


def _check_drawn(record: Mapping[str, Any], sampling: Sampling, *, allowed: bool) -> None:
    """Check tokens that were not drawn from the policy alone: what makes up for them is known."""
    hot = record.get("first_temperature"), record.get("first_top_k", 0)
    own = sampling.first_temperature, sampling.first_top_k
    if hot[0] is not None and hot != own:
        raise ValueError(
            f"the stored rollout was sampled with first_temperature {hot[0]} and first_top_k "
            f"{hot[1]}, here they are {own[0]} and {own[1]}, and only as they were the responses "
            "get the weights that make up for them; set both in sampling"
        )
    if hot[0] is None and sampling.starts_hot:  # also where it was not stored yet how
        raise ValueError(
            "the stored rollout does not tell how its first tokens were drawn: if hot, then before "
            "first_temperature was stored: sample and store it anew; if with top_p, top_k, min_p "
            "or min_new_tokens, which no weights make up for: leave first_temperature out of "
            "sampling"
        )
    if hot[0] is None and not allowed:
        raise ValueError(
            "the stored rollout was sampled with top_p, top_k, min_p or min_new_tokens, and does "
            "not hold which ids these left (it was sampled with allow_truncated_sampling: true, or "
            "by an earlier version); accept the bias with allow_truncated_sampling: true, or "
            "sample and store it anew"
        )


def _check_mask(rollout: Rollout, engine: RolloutEngine) -> None:
    """Refuse responses that an engine or wrapper returned without their masks or with others."""
    mask = rollout.sampling_mask
    if mask is None:
        raise ValueError(
            f"{type(engine).__name__} returned responses without the ids that sampling.top_p, "
            "top_k, min_p or min_new_tokens left at each token: set Segment.mask of what it "
            "samples, or accept the bias with allow_truncated_sampling: true"
        )
    outside = rollout.response_mask & ~mask.holds(rollout.input_ids)
    if outside.any():
        row, column = outside.nonzero()[0].tolist()
        raise ValueError(
            f"{type(engine).__name__} returned token {int(rollout.input_ids[row, column])} (row "
            f"{row}, column {column}), which is not among the ids of its sampling mask: it could "
            "not have been sampled, and would have probability 0; the Segment.mask of another "
            "segment or token was set"
        )


def _experts(rollout: Rollout) -> Tensor:
    """Return the experts that are replayed; raises ``ValueError`` without any."""
    if rollout.routed_experts is None:
        raise ValueError(
            "update.replay_routing: the responses came without their experts, from an engine of "
            "your own (Response.experts) or a run that stored none: set it to false"
        )
    return rollout.routed_experts


def _check_recorded(stored: StoredRollout, *, step: int, holds_copy: bool) -> None:
    """Check that the update can be the one of the earlier run."""
    if stored.rollout.weight_version is None or not holds_copy:
        raise ValueError(
            "as_recorded replays responses of an engine that has a copy of the weights, and needs "
            "the model.engine of the recorded run (it is not started): set it, or drop as_recorded"
        )
    recorded = stored.records[0]["step"]
    if recorded != step:
        raise ValueError(
            f"iteration {step} was given the responses of iteration {recorded}, and as_recorded "
            "repeats the updates of the recorded run: set shuffle: false, keep all of its files, "
            "and begin with the weights or the checkpoint that it began with"
        )


def as_collected(stored: StoredRollout, *, step: int) -> tuple[Collected, Tensor]:
    """Put a stored rollout into the form of one that was just sampled.

    Args:
        stored: From an earlier iteration, whose number becomes ``stored_step`` in the records.
        step: The iteration that it is trained on in.

    Returns:
        The rollout, and `[B]` the rows that only filled its batch.
    """
    records: list[dict[str, Any]] = [
        {**record, "step": step, "stored_step": record["step"]} for record in stored.records
    ]
    names = tuple(records[0]["rewards"])
    result = RewardResult(
        scores=stored.scores.cpu(),
        per_function=_table(names, [record["rewards"] for record in records]),
        weights=_table(names, [record["weights"] for record in records])
        if all("weights" in record for record in records)
        else None,
        names=names,
        metrics={},
        extras={},
        failures=[],
    )
    padding_rows = torch.tensor(
        [bool(record.get("padding", False)) for record in records],
        device=stored.rollout.truncated.device,
    )
    return Collected(stored.rollout, result, records, extra_values_of(records)), padding_rows


def _table(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Float[Tensor, "B K"]:
    """Read numbers of records; NaN: null, or none of that name."""
    values = [[row.get(name) for name in names] for row in rows]
    return torch.tensor(
        [[math.nan if value is None else float(value) for value in row] for row in values]
    )


_SINGLE = "let a judge look at single ones (mode: absolute, or reference_column)"


def check_engine(engine: RolloutEngine, settings: PolicySettings) -> None:
    """Refuse an engine that cannot do what the settings ask for.

    Raises:
        ValueError: Names the setting, and an engine that can.
    """
    can = engine.capabilities
    hot = settings.sampling.starts_hot or settings.eval_sampling.starts_hot
    if hot and not can.reports_kept_mass:
        raise ValueError(
            f"sampling.first_temperature: {type(engine).__name__} draws all tokens of a response "
            "at one temperature: leave it out, or take lrlhf.rollout.TransformersEngine"
        )
    most = can.max_sampling_mask
    if settings.keeps_mask and most is not None and not 0 < settings.sampling.top_k <= most:
        bound = f"only with sampling.top_k from 1 to {most}: set it too" if most else "in no case"
        raise ValueError(
            "sampling.top_p, top_k, min_p or min_new_tokens cuts tokens off, and "
            f"{type(engine).__name__} returns which were left {bound}, set them to 1.0, 0, 0.0 and "
            "0, or take lrlhf.rollout.TransformersEngine (eval_sampling may cut)"
        )
    if settings.update.replay_routing and not can.records_experts:
        raise ValueError(
            f"update.replay_routing: {type(engine).__name__} does not return the experts that each "
            "token went through: leave it out, or take lrlhf.rollout.TransformersEngine"
        )
    biased = settings.sampling.truncates and settings.allow_truncated_sampling
    if biased and not can.reports_kept_mass:
        raise ValueError(
            f"sampling.top_p, top_k, min_p or min_new_tokens cuts tokens off, and "
            f"{type(engine).__name__} does not tell how much probability that was, so its "
            "log-probabilities do not compare with the policy's: leave "
            "allow_truncated_sampling out, set them to 1.0, 0, 0.0 and 0, or take "
            "lrlhf.rollout.TransformersEngine (eval_sampling may cut)"
        )
    check_format(engine, settings.eval_sampling, option="eval_sampling")
    if settings.max_staleness > 0 and not can.concurrent:
        raise ValueError(
            f"max_staleness is {settings.max_staleness}, but model.engine is "
            f"{type(engine).__name__}, which computes in the training process: set "
            "max_staleness: 0, or take lrlhf.rollout.VLLMServerEngine"
        )
    if settings.max_staleness > 1 and not can.updates_in_flight:
        raise ValueError(
            f"max_staleness is {settings.max_staleness}, but {type(engine).__name__} takes no new "
            "weights while it generates: set max_staleness: 1, or take "
            "lrlhf.rollout.VLLMServerEngine"
        )


def check_generating_ahead(settings: PolicySettings, rewards: Rewards) -> None:
    """Refuse to generate ahead what could not be scored after a resume.

    Raises:
        ValueError: A reward function reads environments; names it.
    """
    if not settings.max_staleness or settings.episodes is None:
        return
    if names := rewards.asking_for("environments"):
        raise ValueError(
            f"the reward function {names[0]} reads the environments, which a resumed run has "
            "not for responses that were generated ahead: set max_staleness: 0, or give the "
            "environment get_reward() and take environment_reward"
        )


def check_compared(rewards: Rewards, num_generations: int) -> None:
    """Refuse rewards that compare the responses to a prompt where there is one of each.

    Raises:
        ValueError: There is.
    """
    names = comparing(rewards.functions)
    if names and num_generations < 2:
        raise ValueError(
            f"num_generations is {num_generations}, and the reward {names[0]!r} compares the "
            f"responses to a prompt: set it to 2 or more, or {_SINGLE}"
        )


def check_extra_samples(rewards: Rewards, extra_samples: Iterable[str]) -> None:
    """Refuse rewards that compare responses where the algorithm has one scored alone.

    Args:
        rewards: Of the training.
        extra_samples: Of the algorithm, one to a prompt.

    Raises:
        ValueError: There is such a response, and such a reward.
    """
    names = comparing(rewards.functions)
    if names and (alone := ", ".join(extra_samples)):
        raise ValueError(
            f"the algorithm has one more response to each prompt ({alone}) scored alone, and the "
            f"reward {names[0]!r} compares responses: take rloo, or {_SINGLE}"
        )


def check_evaluation(functions: Rewards, settings: PolicySettings, *, answers_once: bool) -> None:
    """Refuse functions that compare responses where an evaluation scores one of a prompt alone.

    Those that a recipe asks about some labels only are left to the run: data may have others.

    Args:
        functions: Rewards or metrics that the evaluation asks.
        settings: Of the run.
        answers_once: Whether every prompt is answered once, whatever the settings say.

    Raises:
        ValueError: It does; says which samples would do.
    """
    names = [name for name in comparing(functions.functions) if name in functions.unconditional]
    if not names:
        return
    check_compared(functions, settings.num_generations)
    evaluation, size = settings.evaluation, settings.num_generations
    temperatures = evaluation.temperatures or (settings.eval_sampling.temperature,)
    several = (
        "set evaluation.num_samples to a multiple of num_generations at temperatures above 0, or "
        "trainer.limit_val_batches: 0, or "
    )
    if answers_once:
        reason, several = "a prediction has one response to a prompt", "validate, or "
    elif evaluation.num_samples % size == 1:
        reason = (
            f"evaluation.num_samples is {evaluation.num_samples}, and samples are taken in rounds "
            f"of num_generations ({size}), one of which has a single response to a prompt"
        )
    elif min(temperatures) == 0:
        reason = "one of the temperatures of evaluations is 0, where a prompt has one response"
    else:
        return
    raise ValueError(
        f"{reason}, and the reward {names[0]!r} compares the responses to a prompt: "
        f"{several}{_SINGLE}"
    )
