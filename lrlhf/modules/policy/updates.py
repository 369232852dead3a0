"""What surrounds the optimizer steps of an iteration: its plan, its minibatches, its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from lrlhf.models import ReferencePolicy, looking_once
from lrlhf.modules.base import TrainingModule
from lrlhf.modules.metrics.rollout_metrics import explained_variance
from lrlhf.modules.policy.batch_plan import BatchPlan, plan_batches
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.policy_settings import PolicySettings
from lrlhf.modules.settings import Reference
from lrlhf.rollout import minibatches, trim
from lrlhf.run.sequence_balancing import balance_over_ranks
from lrlhf.types import Experience, PromptBatch, SequenceBatch, StoredRollout

_SHOWN = ("rollout/score", "kl/reference")


def plan_iteration(
    batch: PromptBatch | StoredRollout, settings: PolicySettings, it: Iteration
) -> BatchPlan:
    """Work out the sizes of an iteration.

    Raises:
        ValueError: They do not fit; says which would.
    """
    stored, sampling = isinstance(batch, StoredRollout), settings.dynamic_sampling
    return plan_batches(
        prompts_per_rank=len(batch) // settings.num_generations if stored else len(batch),
        num_generations=settings.num_generations,
        world_size=it.ranks.world_size,
        minibatch_size=settings.update.minibatch_size,
        num_iterations=settings.update.num_iterations,
        num_minibatches=settings.update.num_minibatches,
        default_minibatches=settings.default_minibatches,
        kept_prompts=sampling.prompts if sampling and not stored else None,
    )


def minibatches_of(
    experience: Experience,
    texts: SequenceBatch | None,
    settings: PolicySettings,
    models: Sequence[nn.Module],
    it: Iteration,
) -> Iterator[tuple[Experience, SequenceBatch | None]]:
    """Yield the minibatches of all passes over an experience, rows balanced over the ranks.

    Args:
        experience: Of this rank.
        texts: Pretraining texts, dealt to the minibatches of a pass; None: there are none.
        settings: How many passes and minibatches.
        models: What is trained; put into training mode.
        it: The iteration.
    """
    for model in models:
        model.train()
    size = settings.minibatch_rows(len(experience), it.ranks)
    dealt = _dealt_texts(texts, len(experience) // size)
    for _ in range(settings.update.num_iterations):
        for part, text in zip(minibatches(experience, size=size), dealt, strict=True):
            balanced = balance_over_ranks(part, it.ranks)
            it.metrics.add("perf/token_imbalance", balanced.after, 1.0)
            # features that nothing is trained for are computed once per step, the others once per
            # micro-batch
            with looking_once():
                yield balanced.rows, text


def _dealt_texts(texts: SequenceBatch | None, steps: int) -> list[SequenceBatch | None]:
    """Deal the pretraining texts to the optimizer steps of one pass."""
    if texts is None:
        return [None] * steps
    if len(texts) < steps:
        raise ValueError(
            f"a batch has {len(texts)} pretraining texts per process for {steps} optimizer steps: "
            f"raise data.pretraining_batch_size to a multiple of {steps}, or set "
            "update.num_minibatches to 1"
        )
    parts = torch.arange(len(texts)).tensor_split(steps)
    return [trim(texts.select(rows)) for rows in parts]


def check_texts(texts: SequenceBatch | None, settings: PolicySettings) -> None:
    """Refuse texts without a weight, and a weight without texts.

    Raises:
        ValueError: One of the two is missing.
    """
    coefficient = settings.update.pretraining_coef
    if (texts is None) != (coefficient == 0):
        raise ValueError(
            f"update.pretraining_coef is {coefficient}, and the data has "
            f"{'no ' if texts is None else ''}pretraining texts (an option of "
            "PromptDataModule): set both, or neither"
        )


def advance_schedules(module: TrainingModule, freeze_steps: Sequence[int]) -> None:
    """Let every learning rate go on by one iteration, whether or not it took a step.

    Args:
        module: Its optimizers in their order.
        freeze_steps: Iterations at the start in which each waits: a schedule begins when its model
            begins to learn.
    """
    for index, frozen in enumerate(freeze_steps):
        if module.global_step >= frozen:
            module.advance_schedule(index)


def mix_reference(
    frozen: ReferencePolicy | None, policy: nn.Module, settings: Reference, it: Iteration
) -> None:
    """Mix the policy into its reference when its time has come."""
    every = settings.sync_every
    if frozen is not None and every is not None and (it.step + 1) % every == 0:
        frozen.mix(policy, settings.mixup)


def log_iteration(module: TrainingModule, experience: Experience, it: Iteration) -> None:
    """Log the metrics of an iteration, all ranks together."""
    it.measure_times(float(experience.attention_mask.sum()))
    for name, count in module.step_guard.metrics().items():
        it.metrics.add(name, count, 1.0)
    reduced = it.metrics.reduce(it.ranks, it.device)
    if "value/return_std" in reduced:
        reduced["value/explained_variance"] = explained_variance(
            reduced["value/error_std"], reduced["value/return_std"]
        )
    for name, value in reduced.items():
        module.log(name, value, prog_bar=name in _SHOWN, batch_size=len(experience))
