"""The loss of one micro-batch: the algorithm's, the terms beside it, and the critic's.

The formulas are in `lrlhf.functional` (PPO's clip range of the ratio: `clipped_policy_loss`); here
their denominators are taken over the whole optimizer step, so that no split into micro-batches or
ranks changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.functional.algorithm import PolicyLoss, log_metric_of
from lrlhf.functional.kl import kl_estimate, unbiased_kl_estimate
from lrlhf.functional.masking import masked_mean
from lrlhf.functional.policy import aggregate, off_policy_sequence_mask
from lrlhf.functional.value_loss import clipped_value_loss
from lrlhf.guard.anomalies import StepWatch
from lrlhf.models import SequenceOutputs, loss_tokens, sequence_logprobs, sequence_outputs
from lrlhf.modules.base import SteppedOptimizer
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.metrics.rollout_metrics import measure_mismatch, measure_update
from lrlhf.modules.policy.experience import measure_importance, start_from
from lrlhf.modules.policy.guard import describe_rows, show_probabilities
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.load_policy import LoadedPolicy
from lrlhf.modules.policy.settings import PolicySettings
from lrlhf.modules.policy.teacher import RunTeacher, measure_distance
from lrlhf.modules.policy.update import OptimizerStep
from lrlhf.modules.settings import Critic
from lrlhf.types import Experience, SequenceBatch


class LossTerms(NamedTuple):
    """Loss of one micro-batch and what it was made of; sums, to be added up over micro-batches."""

    loss: Tensor
    """Scalar with gradient, already divided by the denominator of the whole optimizer step."""
    policy: Tensor
    kl: Tensor
    entropy: Tensor
    teacher: Tensor


class Denominators(NamedTuple):
    """What the sums of one optimizer step are divided by, over all ranks.

    Normalisation under gradient accumulation: micro-batches add up to the loss of the whole step.
    """

    rows: Tensor
    tokens: Tensor
    selected: Tensor
    """Tokens of the policy loss, which may be restricted to some of ``tokens``."""
    valued: Tensor
    """Tokens of the value loss."""

    @classmethod
    def of(cls, part: Experience, it: Iteration) -> Denominators:
        """Count those of a minibatch of this rank, and add them up over the ranks."""
        return cls(*it.ranks.sum(denominators(part).to(it.device)))


def denominators(experience: Experience) -> Tensor:
    """`[4]`: the `Denominators` of this rank, to be added up over the ranks."""
    selected = experience.loss_mask if experience.selected is None else experience.selected
    masks = (experience.counted, experience.loss_mask, selected, experience.value_mask)
    return torch.stack([mask.sum() for mask in masks]).float()


def summed_tokens(loss: PolicyLoss, *, tokens: Tensor, rows: Tensor) -> Tensor:
    """Return the mean number of tokens that the policy term sums over per row: 1 of a mean.

    A mean per token that is no `LossTerms`, of pretraining texts or of a router, is multiplied by
    it, so that it keeps its proportion too.
    """
    if loss.term_aggregate == "sequence_sum":
        return tokens / rows.clamp(min=1)
    return torch.ones_like(tokens)


def loss_terms(  # noqa: PLR0913  the terms of the objective
    logprobs: Tensor,
    experience: Experience,
    *,
    loss: PolicyLoss,
    entropy_coef: float,
    kl_estimator: str,
    kl_coef: float,
    totals: Denominators,
    max_new_tokens: int,
    entropy: Tensor | None = None,
    divergence: Tensor | None = None,
    teacher_coef: float = 0.0,
    off_policy_threshold: float | None = None,
    metrics: MetricSums | None = None,
) -> LossTerms:
    """Loss of a micro-batch, as its share of the loss of the whole optimizer step.

    Args:
        logprobs: `[B, T]` of the current policy, with gradient.
        experience: The rows, ``advantages`` and ``loss_mask`` set; ``importance_weights`` multiply
            each token's gradient in the policy term; no other term, and no denominator.
        loss: With its options in place.
        entropy_coef: Weight of the entropy bonus.
        kl_estimator: k2, k3 or unbiased.
        kl_coef: Strength of the KL term of the loss; 0 where the penalty is in the reward.
        totals: Rows and tokens of the whole optimizer step.
        max_new_tokens: Constant length of Dr. GRPO's normalisation.
        entropy: `[B, T]` of the current policy; None: no bonus.
        divergence: `[B, T]` from its teacher, with gradient; None: there is none in the loss.
        teacher_coef: Weight of the divergence.
        off_policy_threshold: See `off_policy_sequence_mask`; None: no response is dropped. One that
            is dropped still counts in the denominators.
        metrics: Receives what the loss logs.
    """
    mask = experience.loss_mask
    selected = mask if experience.selected is None else experience.selected
    old = experience.old_logprobs if experience.old_logprobs is not None else logprobs.detach()
    advantages, weights = experience.advantages, experience.importance_weights
    per_response = loss.level == "sequence"
    weighted = logprobs
    of_tokens = advantages
    if per_response:
        # the one value of each response, which all of its tokens repeat
        advantages = masked_mean(advantages, experience.response_mask, dim=1)
        of_tokens = advantages[:, None].expand_as(logprobs)
        weighted = _with_weighted_gradient(logprobs, weights)
    metrics = metrics or MetricSums()
    further: dict[str, Any] = {**log_metric_of(loss.function, metrics.add_of_algorithm)}
    if loss.choose is not None:
        further["covariant"] = experience.covariant
    values = loss.function(weighted, old, advantages, selected, **loss.function_options, **further)
    if weights is not None and not per_response:
        values = values * weights
    if off_policy_threshold is not None:
        keep = off_policy_sequence_mask(
            logprobs,
            experience.engine_logprobs,
            of_tokens,
            mask,
            threshold=off_policy_threshold,
        )
        metrics.add_values("policy/off_policy_fraction", (~keep)[mask].float())
        values = torch.where(keep[:, 0] if per_response else keep, values, 0.0)

    def share(term: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        mode = loss.term_aggregate
        divisor = {
            "token_mean": tokens,
            "sequence_mean": totals.rows,
            "sequence_sum": totals.rows,
            "constant": totals.rows * max_new_tokens,
        }[mode].clamp(min=1)
        return aggregate(term, mask, mode=mode, denominator=divisor)

    if per_response:
        policy = values.sum() / totals.rows.clamp(min=1)
    else:
        policy = share(values, selected, totals.selected)
    zero = policy.detach() * 0
    kl = zero
    if kl_coef > 0 and experience.ref_logprobs is not None:
        if kl_estimator == "unbiased":
            estimate = unbiased_kl_estimate(logprobs, experience.ref_logprobs, old)
        else:
            estimate = kl_estimate(logprobs, experience.ref_logprobs, estimator=kl_estimator)
        kl = share(estimate, mask, totals.tokens)
    bonus = zero if entropy is None else share(entropy, mask, totals.tokens)
    taught = zero if divergence is None else share(divergence, mask, totals.tokens)
    total = policy + kl_coef * kl - entropy_coef * bonus + teacher_coef * taught
    parts = (policy, kl, bonus, taught)
    return LossTerms(total, *(part.detach() for part in parts))


def _with_weighted_gradient(logprobs: Tensor, weights: Tensor | None) -> Tensor:
    """Weigh the gradient of every token by a stop-gradient (straight-through), and keep the values.

    A response's ratio is made of the values. So weights per token fit a loss that has one value per
    response: its gradient is a sum over tokens, each of which takes its own weight.
    """
    if weights is None:
        return logprobs
    now = logprobs.detach()
    return now + weights * (logprobs - now)


def value_loss(
    values: Tensor, experience: Experience, *, critic: Critic, totals: Denominators
) -> Tensor:
    """Loss of the critic on a micro-batch, as its share of the mean over the step's tokens.

    Args:
        values: `[B, T]` of the current critic, with gradient.
        experience: The rows, ``values`` and ``returns`` set.
        critic: Its value clip.
        totals: Tokens of the whole optimizer step.
    """
    assert experience.values is not None
    assert experience.returns is not None
    mask = experience.value_mask
    errors = clipped_value_loss(
        values,
        experience.values,
        experience.returns,
        mask,
        value_clip_range=critic.value_clip_range,
    )
    return aggregate(errors, mask, mode="token_mean", denominator=totals.valued)


def step_of(
    models: Sequence[PreTrainedModel | PeftModel],
    tokenizer: PreTrainedTokenizerBase,
    settings: PolicySettings,
) -> Callable[..., OptimizerStep[Experience]]:
    """Return what makes the optimizer steps of an experience's minibatches.

    Args:
        models: What the rows go through.
        tokenizer: Writes the rows of a dump.
        settings: Of the run.
    """
    return partial(
        OptimizerStep[Experience],
        models=models,
        tokenizer=tokenizer,
        max_tokens=settings.update.micro_batch_tokens,
        # experts are balanced over the tokens of whole rows
        shared=settings.update.router_loss_coef == 0,
        describe=lambda part, watch: describe_rows(part, tokenizer, watch.log_ratios),
    )


class PolicyStep:
    """The policy's optimizer step on a minibatch.

    Args:
        policy: The model, whose optimizer is the module's first, and its tokenizer.
        settings: Algorithm, update and sampling of the run.
        teacher: The teacher; None: there is none.
    """

    stage = "policy"
    """What dumps call it."""

    def __init__(
        self, policy: LoadedPolicy, settings: PolicySettings, teacher: RunTeacher | None = None
    ) -> None:
        self._policy = policy.model
        self._settings, update = settings, settings.update
        self._teacher = teacher if teacher and teacher.in_loss else None
        self.optimizer = SteppedOptimizer(0, "policy", update.max_grad_norm, update.freeze_steps)
        models = [policy.model]
        if self._teacher is not None and self._teacher.model is not None:
            models.append(self._teacher.model.model)
        self.optimizer_step = step_of(models, policy.tokenizer, settings)
        """Makes an `OptimizerStep` whose rows go through these models."""

    def __call__(
        self, part: Experience, text: SequenceBatch | None, it: Iteration
    ) -> StepWatch | None:
        """Take the step.

        Args:
            part: The minibatch of this rank.
            text: Pretraining texts that belong to it.
            it: The iteration.

        Returns:
            What was seen of it; None: there was nothing to learn from.
        """
        totals = Denominators.of(part, it)
        # a step without a gradient would still move the weights by the optimizer's momentum
        if it.freezes(self.optimizer) or (float(totals.tokens) == 0 and text is None):
            return None
        step = self.optimizer_step(
            part,
            it,
            [self.optimizer],
            stage=self.stage,
            text=text,
            text_loss=self.text_loss(text, it),
        )
        for micro in step:
            loss, _ = self.loss(micro, step, totals, it)
            step.backward(loss)
        return step.watch

    def loss(
        self,
        micro: Experience,
        step: OptimizerStep[Experience],
        totals: Denominators,
        it: Iteration,
        *,
        value_head: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, SequenceOutputs]:
        """Compute a micro-batch's share of the step's loss, and what the model gave.

        Args:
            micro: The rows, on the device.
            step: The optimizer step, whose watch is shown the probabilities.
            totals: Of the whole step over all ranks.
            it: The iteration, told the metrics.
            value_head: Reads the last hidden states; None: there is none.
        """
        settings, teacher, share = self._settings, self._teacher, step.share
        update, loss = settings.update, settings.algorithm.loss
        out = sequence_outputs(
            self._policy,
            micro,
            temperature=settings.sampling.temperature,
            chunk_size=update.logprob_chunk,
            entropy=it.entropy_coef > 0,
            value_head=value_head,
            router_loss=update.router_loss_coef > 0,
            teacher=teacher.rows if teacher else None,
            beta=teacher.settings.beta if teacher else 1.0,
            replay=True,
        )
        now = out.logprobs.detach()
        on_policy = micro.old_logprobs is None
        # before anything has moved, the engine's probabilities compare with the policy's
        unseen = on_policy or (micro.old_source == "engine" and it.optimizer_steps == 1)
        show_probabilities(step.watch, now, micro, loss, unseen=unseen)
        if unseen:
            measure_mismatch(now, micro, it.metrics)
        if on_policy:
            micro = start_from(micro, now, settings, it)
        taught = micro.taught(micro.loss_mask)
        terms = loss_terms(
            out.logprobs,
            micro,
            loss=loss,
            entropy_coef=it.entropy_coef,
            kl_estimator=settings.reference.kl_estimator or "k3",
            kl_coef=0.0 if settings.kl_in_reward else it.kl_coef,
            totals=totals,
            max_new_tokens=settings.sampling.max_new_tokens,
            entropy=out.entropy,
            divergence=out.teacher and out.teacher.divergence.where(taught, 0.0),
            teacher_coef=teacher.settings.coef if teacher else 0.0,
            off_policy_threshold=update.off_policy_threshold,
            metrics=it.metrics,
        )
        total = terms.loss
        if out.router_loss is not None:
            weight = micro.loss_mask.sum() / totals.tokens.clamp(min=1)
            summed = summed_tokens(loss, tokens=totals.tokens, rows=totals.rows)
            total = total + update.router_loss_coef * summed * weight * out.router_loss
            it.metrics.add("policy/router_loss", weight * out.router_loss.detach(), share)
        it.metrics.add("train/loss", total, share)
        it.metrics.add("policy/loss", terms.policy, share)
        if it.kl_coef > 0 and not settings.kl_in_reward:
            it.metrics.add("kl/loss", terms.kl, share)
        if out.teacher is not None:
            it.metrics.add("teacher/loss", terms.teacher, share)
            measure_distance(out.teacher, now, taught, it.metrics)
        measure_update(now, out.entropy, micro, it.metrics, loss=loss)
        measure_importance(micro, it.metrics, settings.importance)
        return total, out

    def text_loss(self, text: SequenceBatch | None, it: Iteration) -> Callable[[], Tensor] | None:
        """Return the loss of the pretraining texts of a minibatch, to be computed in its turn."""
        if text is None:
            return None
        texts = text.to(it.device)
        mask = loss_tokens(self._policy, texts)
        texts = replace(texts, response_mask=mask)
        update = self._settings.update

        def compute() -> Tensor:
            own = torch.stack([mask.sum(), mask.any(dim=1).sum()])
            tokens, rows = it.ranks.sum(own.float()).unbind()
            logprobs = sequence_logprobs(self._policy, texts, chunk_size=update.logprob_chunk)
            loss = -logprobs.sum() / tokens.clamp(min=1)
            it.metrics.add("policy/pretraining_loss", loss, 1 / it.ranks.world_size)
            summed = summed_tokens(self._settings.algorithm.loss, tokens=tokens, rows=rows)
            return update.pretraining_coef * summed * loss

        return compute
