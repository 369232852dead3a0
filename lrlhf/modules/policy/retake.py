"""Takes a step of a policy again from its bundle, with the code that took it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from lrlhf.guard.anomalies import measure
from lrlhf.guard.bundle import StepBundle
from lrlhf.guard.dump_replay import Retaken
from lrlhf.models import looking_once
from lrlhf.modules.base import TrainingModule
from lrlhf.modules.policy.experience import Sample
from lrlhf.modules.policy.gradient_step import OptimizerStep
from lrlhf.modules.policy.iteration import Iteration, UpdateContext
from lrlhf.modules.policy.policy_guard import ITERATION, columns_of, describe_rows
from lrlhf.modules.policy.policy_parts import PolicyParts
from lrlhf.modules.policy.running_moments import ScoreMoments
from lrlhf.types import Experience, Rollout, SequenceBatch


def retake(
    module: TrainingModule,
    bundle: StepBundle,
    *,
    steps: Sequence[OptimizerStep],
    parts: PolicyParts,
) -> Retaken:
    """Take the step of a bundle again.

    Args:
        module: With weights and optimizer states as the step found them.
        bundle: Of one rank.
        steps: The module's optimizer steps.
        parts: The module's, which make an iteration's experience.
    """
    it = Iteration(module, seeds=bundle.seeds[0])
    context = UpdateContext(**{name: bundle.context[name] for name in UpdateContext._fields})
    if bundle.stage == ITERATION:
        return _retake_iteration(bundle, context, it, parts)
    part, text = bundle.batches["part"], bundle.batches.get("text")
    assert isinstance(part, Experience)
    assert text is None or isinstance(text, SequenceBatch)
    for model in module.trainable_models().values():
        model.train()
    take = {step.stage: step for step in steps}[bundle.stage]
    with looking_once():
        watch = take(part, text, it, context)
    moves = None if watch is None else watch.log_ratios
    return Retaken(records=describe_rows(part, parts.policy.tokenizer, moves), sums=None)


def _retake_iteration(
    bundle: StepBundle,
    context: UpdateContext,
    it: Iteration,
    parts: PolicyParts,
) -> Retaken:
    it.seed_before_update()
    stored = bundle.batches["experience"].to(it.device)
    assert isinstance(stored, Experience)
    sample = Sample(
        Rollout(**{one.name: getattr(stored, one.name) for one in fields(Rollout)}),
        stored.scores,
        {name: column.to(it.device) for name, column in columns_of(bundle).items()},
        bundle.context["filler"].to(it.device),
        records=[],
        stored=context.stored,
    )
    moments = ScoreMoments(bundle.context["mean"], bundle.context["deviation"])
    experience, _ = parts.experience(sample, moments, context.kl_coef, it)
    sums = measure(experience, replayed=context.stored, drawn=context.from_engine)
    return Retaken(records=describe_rows(experience, parts.policy.tokenizer, None), sums=sums)
