"""How experience becomes optimizer steps of a policy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrlhf.guard.anomalies import Anomaly
from lrlhf.guard.dump import StepInputs
from lrlhf.models import (
    SequenceOutputs,
    looking_once,
    packs,
    plain_model,
    ruled_out_ids,
    sequence_logprobs,
    sequence_outputs,
)
from lrlhf.modules.checks import uses_loss_scaler
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.metrics.rollout_metrics import measure_mismatch, measure_update
from lrlhf.modules.policy.batch_plan import BatchPlan, largest_divisor
from lrlhf.modules.policy.importance_sampling import (
    AUTOMATIC,
    ImportanceSampling,
    measure_importance,
    off_policy_rows,
    weighted,
)
from lrlhf.modules.policy.objective import (
    Denominators,
    denominators,
    policy_loss,
    summed_tokens,
)
from lrlhf.modules.policy.policy_guard import PolicyGuard
from lrlhf.modules.settings import Reference, Update
from lrlhf.rollout import Pass, RolloutEngine, Sampling, minibatches, plan_passes, trim
from lrlhf.run import Collectives, Updater
from lrlhf.run.sequence_balancing import balance_over_ranks
from lrlhf.types import Experience, SequenceBatch

TakesStep = Callable[[Experience, SequenceBatch | None, MetricSums, Collectives], None]
"""Takes one optimizer step, of one optimizer or of several from one backward pass."""


class Turn(NamedTuple):
    """An optimizer whose step is next."""

    optimizer: int
    role: str
    max_grad_norm: float


class PolicyUpdate(PolicyGuard):
    """The half of `PolicyModule` that takes gradients.

    A minibatch is cut into micro-batches whose losses add up to that of the whole: the denominators
    are those of the optimizer step over all ranks, so no cut changes the gradient. The one
    exception is the load-balancing loss of a mixture of experts, which is no sum over tokens: it is
    computed per micro-batch, and weighted by its tokens.
    """

    policy: PreTrainedModel | PeftModel
    sampling: Sampling
    reference: Reference
    update: Update
    importance_sampling: ImportanceSampling | None
    default_minibatches: ClassVar[int] = 1
    """Of an iteration whose ``update`` says nothing."""
    engine: RolloutEngine
    kl_coef: float
    _updater: Updater

    def trainable_models(self) -> dict[str, nn.Module]:
        """Models that receive gradients, by role."""
        raise NotImplementedError

    @property
    def _kl_in_reward(self) -> bool:
        raise NotImplementedError

    def _texts(
        self, pretraining: SequenceBatch | None, plan: BatchPlan
    ) -> list[SequenceBatch | None]:
        """Deal the pretraining texts to the optimizer steps of one pass."""
        coefficient = self.update.pretraining_coef
        if (pretraining is None) != (coefficient == 0):
            raise ValueError(
                f"update.pretraining_coef is {coefficient}, and the data has "
                f"{'no ' if pretraining is None else ''}pretraining texts (an option of "
                "PromptDataModule): set both, or neither"
            )
        if pretraining is None:
            return [None] * plan.steps_per_pass
        if len(pretraining) < plan.steps_per_pass:
            raise ValueError(
                f"a batch has {len(pretraining)} pretraining texts per process for "
                f"{plan.steps_per_pass} optimizer steps: raise data.pretraining_batch_size to a "
                f"multiple of {plan.steps_per_pass}, or set update.num_minibatches to 1"
            )
        parts = torch.arange(len(pretraining)).tensor_split(plan.steps_per_pass)
        return [trim(pretraining.select(rows)) for rows in parts]

    def _update(
        self,
        experience: Experience,
        texts: Sequence[SequenceBatch | None],
        metrics: MetricSums,
        collectives: Collectives,
        *,
        skip: bool = False,
    ) -> None:
        """Take all steps of an iteration, or with ``skip`` none; the schedules go on anyway."""
        metrics.add("train/lr", self._optimizer(0).param_groups[0]["lr"], 1.0)
        size = self._minibatch_rows(len(experience))
        for model in self.trainable_models().values():
            model.train()
        for _ in range(0 if skip else self.update.num_iterations):
            parts = minibatches(experience, size=size)
            for part, text in zip(parts, texts, strict=True):
                balanced = balance_over_ranks(part, collectives)
                metrics.add("perf/token_imbalance", balanced.after, 1.0)
                # features that nothing is trained for are computed once per step, the others once
                # per micro-batch
                with looking_once():
                    self._optimizer_steps(balanced.rows, text, metrics, collectives)
        schedulers = self.lr_schedulers()
        several = schedulers if isinstance(schedulers, list) else [schedulers]
        for scheduler, freeze_steps in zip(several, self._freeze_steps, strict=True):
            assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
            # a schedule begins when its model begins to learn
            if self.global_step >= freeze_steps:
                with warnings.catch_warnings():
                    # iterations in which there was nothing to learn from count too
                    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler")
                    scheduler.step()

    def _minibatch_rows(self, rows: int) -> int:
        """Return how many of this process's rows an optimizer step takes."""
        if self.update.minibatch_size is not None:
            return self.update.minibatch_size // self.trainer.world_size
        parts = self.update.num_minibatches
        return rows // (parts or largest_divisor(rows, self.default_minibatches))

    @property
    def _freeze_steps(self) -> list[int]:
        """Iterations at the start in which each optimizer waits."""
        return [self.update.freeze_steps]

    def _optimizer_steps(
        self,
        part: Experience,
        text: SequenceBatch | None,
        metrics: MetricSums,
        collectives: Collectives,
    ) -> None:
        """Take the step of every optimizer on one minibatch."""
        if not self._is_frozen(0):
            self._policy_step(part, text, metrics, collectives)

    def _is_frozen(self, optimizer: int) -> bool:
        return self.global_step < self._freeze_steps[optimizer]

    def _policy_step(
        self,
        part: Experience,
        text: SequenceBatch | None,
        metrics: MetricSums,
        collectives: Collectives,
    ) -> None:
        totals = self._totals(part, collectives)
        if float(totals.tokens) == 0 and text is None:
            # a step without a gradient would still move the weights by the optimizer's momentum
            return
        inputs = self._begin_step("policy", part, text)
        self._accumulate(
            part,
            lambda micro, share: self._policy_loss(micro, totals, metrics, share=share)[0],
            collectives,
            metrics,
            text_loss=self._text_loss(text, metrics, collectives),
        )
        self._finish_step([self._policy_turn], inputs, part, metrics, collectives)

    @property
    def _policy_turn(self) -> Turn:
        return Turn(0, "policy", self.update.max_grad_norm)

    def _totals(self, part: Experience, collectives: Collectives) -> Denominators:
        return Denominators(*collectives.sum(denominators(part).to(self.device)))

    def _accumulate(
        self,
        part: Experience,
        loss_of: Callable[[Experience, float], Tensor],
        collectives: Collectives,
        metrics: MetricSums,
        *,
        text_loss: Callable[[], Tensor] | None = None,
    ) -> None:
        """Add up the gradients of a minibatch.

        Args:
            part: The minibatch, cut into micro-batches here.
            loss_of: A micro-batch's share of the step's loss, the shares adding up to it; gets the
                micro-batch on the device and its weight in metrics that are means over them.
            collectives: The ranks.
            metrics: Told how many tokens were computed.
            text_loss: A further share that no response belongs to.
        """
        passes = self._passes(part, self._backbones, collectives)
        share = 1 / len(passes) / collectives.world_size
        if text_loss is not None:
            loss = text_loss()
            self._watch.see_loss(loss, lambda: "in the pretraining texts")
            # not as the last: ranks add up the gradients of what the last pass goes through
            self._backward(loss, collectives, last=False)
        for index, one in enumerate(passes):
            metrics.add("perf/padding_fraction", one.padding, one.computed)
            metrics.add("perf/shared_fraction", one.shared, one.given)
            micro = trim(part.select(one.rows)).to(self.device)
            self._watch.turn_to(one.rows)
            loss = loss_of(micro, share)
            # what it shows is large, and says nothing of the place
            place_of = partial(self._place_of, replace(micro, media=None))
            self._watch.see_loss(loss, place_of)
            # also where it is not finite: no rank may leave the others alone in a reduction
            self._backward(loss, collectives, last=index == len(passes) - 1)

    def _passes(
        self,
        part: SequenceBatch,
        models: Sequence[PreTrainedModel | PeftModel],
        collectives: Collectives,
    ) -> list[Pass]:
        """Cut rows into forward passes of some models, equally many on all ranks.

        Where weights are split, all ranks take part in gathering them, pass by pass.
        """
        plan = partial(
            plan_passes,
            part,
            max_tokens=self.update.micro_batch_tokens,
            packed=all(packs(plain_model(model), part) for model in models),
            # experts are balanced over the tokens of whole rows
            shared=self.update.router_loss_coef == 0,
        )
        own = plan()
        if collectives.world_size == 1 or self.update.micro_batch_tokens is None:
            return own
        most = collectives.max(torch.tensor(float(len(own)), device=self.device))
        return own if int(most) == len(own) else plan(at_least=int(most))

    @property
    def _backbones(self) -> list[PreTrainedModel | PeftModel]:
        """What the rows of an optimizer step go through."""
        return [self.policy]

    def _backward(self, loss: Tensor, collectives: Collectives, *, last: bool) -> None:
        # ranks' gradients are averaged, while the denominators already span all ranks
        self._updater.backward(loss * collectives.world_size, last=last)

    def _optimizer(self, index: int) -> LightningOptimizer:
        optimizers = self.optimizers()
        optimizer = optimizers[index] if isinstance(optimizers, list) else optimizers
        assert isinstance(optimizer, LightningOptimizer)
        return optimizer

    def _finish_step(
        self,
        turns: Sequence[Turn],
        inputs: StepInputs,
        part: Experience,
        metrics: MetricSums,
        collectives: Collectives,
    ) -> None:
        """Step the optimizers whose gradients have been added up, unless the guard objects."""
        self._moved = True
        verdict = self._watch.judge(collectives)
        found, left_out = list(verdict.found), verdict.skips
        for index, role, max_norm in turns:
            norm = self._updater.step(
                self._optimizer(index), max_grad_norm=max_norm, leave_out=verdict.skips
            )
            if verdict.skips:
                continue
            if math.isfinite(norm):
                metrics.add(f"{role}/grad_norm", norm, 1.0)
            elif not uses_loss_scaler(self.trainer):
                left_out = True
                if collectives.rank == 0:  # the norm is the same on all
                    found.append(Anomaly("gradient", f"the {role} gradient is not finite"))
        if left_out:
            self._report(found, inputs, part)

    def repeat_step(self, inputs: StepInputs) -> None:
        """Take the step of a dump again, with the code that it was taken with.

        Raises:
            KeyError: This module has no such step.
        """
        part, text = inputs.batches["part"], inputs.batches.get("text")
        assert isinstance(part, Experience)
        assert text is None or isinstance(text, SequenceBatch)
        self._replayed = bool(inputs.extra["replayed"])
        self._takes_drawn, self._moved = bool(inputs.extra["drawn"]), bool(inputs.extra["moved"])
        for model in self.trainable_models().values():
            model.train()
        with looking_once():
            take = self._steps[inputs.stage]
            take(part, text, MetricSums(), Collectives(self.trainer))

    @property
    def step_names(self) -> tuple[str, ...]:
        """The steps that `repeat_step` knows."""
        return tuple(self._steps)

    @property
    def _steps(self) -> dict[str, TakesStep]:
        return {"policy": self._policy_step}

    def _policy_loss(
        self,
        micro: Experience,
        totals: Denominators,
        metrics: MetricSums,
        *,
        share: float,
        value_head: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, SequenceOutputs]:
        out = sequence_outputs(
            self.policy,
            micro,
            temperature=self.sampling.temperature,
            chunk_size=self.update.logprob_chunk,
            entropy=self.update.entropy_coef > 0,
            value_head=value_head,
            router_loss=self.update.router_loss_coef > 0,
        )
        self._see_probabilities(out.logprobs, micro, self.update.function)
        if self._takes_drawn and not self._moved:
            measure_mismatch(out.logprobs.detach(), micro, metrics)
        if micro.old_logprobs is None:
            micro = self._weighted(micro, out.logprobs.detach())
        terms = policy_loss(
            out.logprobs,
            micro,
            update=self.update,
            reference=self.reference,
            kl_coef=0.0 if self._kl_in_reward else self.kl_coef,
            totals=totals,
            max_new_tokens=self.sampling.max_new_tokens,
            entropy=out.entropy,
        )
        loss = terms.loss
        if out.router_loss is not None:
            weight = micro.loss_mask.sum() / totals.tokens.clamp(min=1)
            summed = summed_tokens(self.update.function, tokens=totals.tokens, rows=totals.rows)
            loss = loss + self.update.router_loss_coef * summed * weight * out.router_loss
            metrics.add("policy/router_loss", weight * out.router_loss.detach(), share)
        metrics.add("train/loss", loss, share)
        metrics.add("policy/loss", terms.policy, share)
        if self.kl_coef > 0 and not self._kl_in_reward:
            metrics.add("kl/loss", terms.kl, share)
        measure_update(
            out.logprobs.detach(), out.entropy, micro, metrics, loss=self.update.function
        )
        measure_importance(micro, metrics, self._importance)
        return loss, out

    def _weighted(self, experience: Experience, logprobs: Tensor) -> Experience:
        """Give what the engine drew its importance weights, as far as it needs or asks for them."""
        rows = off_policy_rows(experience, exact=self.engine.exact, step=self.global_step)
        if self.importance_sampling is not None:
            rows = torch.ones_like(rows)
        return weighted(experience, logprobs, self._importance, rows=rows)

    @property
    def _importance(self) -> ImportanceSampling:
        return self.importance_sampling or AUTOMATIC

    def _text_loss(
        self, text: SequenceBatch | None, metrics: MetricSums, collectives: Collectives
    ) -> Callable[[], Tensor] | None:
        """Return the loss of the pretraining texts, to be computed in its turn."""
        if text is None:
            return None
        texts = text.to(self.device)
        # what stands for an image is given, not said
        ruled_out = torch.tensor(ruled_out_ids(self.policy.config), device=self.device)
        said = texts.response_mask & ~torch.isin(texts.input_ids, ruled_out)
        texts = replace(texts, response_mask=said)

        def compute() -> Tensor:
            own = torch.stack([said.sum(), said.any(dim=1).sum()])
            tokens, rows = collectives.sum(own.float()).unbind()
            logprobs = sequence_logprobs(self.policy, texts, chunk_size=self.update.logprob_chunk)
            loss = -logprobs.sum() / tokens.clamp(min=1)
            metrics.add("policy/pretraining_loss", loss, 1 / collectives.world_size)
            summed = summed_tokens(self.update.function, tokens=tokens, rows=rows)
            return self.update.pretraining_coef * summed * loss

        return compute

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._updater.before_step(optimizer)
