"""One optimizer step: micro-batches, backward passes, the guard's verdict, clip and step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.guard.anomalies import Anomaly
from lrlhf.guard.bundle import StepBundle
from lrlhf.guard.step_watch import StepWatch
from lrlhf.modules.checks import uses_loss_scaler
from lrlhf.modules.policy.iteration import Iteration, UpdateContext
from lrlhf.modules.policy.objective import Denominators, PolicyObjective, denominators
from lrlhf.modules.policy.policy_guard import describe_rows, place_in
from lrlhf.modules.policy.policy_settings import PolicySettings
from lrlhf.modules.policy.update_batches import plan_micro_batches
from lrlhf.rollout import trim
from lrlhf.types import Experience, SequenceBatch


class OptimizerStep(Protocol):
    """Takes one optimizer step on a minibatch, of one optimizer or of several together."""

    stage: str
    """What dumps call it."""

    def __call__(
        self, part: Experience, text: SequenceBatch | None, it: Iteration, context: UpdateContext
    ) -> StepWatch | None:
        """Take the step.

        Args:
            part: The minibatch of this rank.
            text: Pretraining texts that belong to it.
            it: The iteration.
            context: Of the iteration's update.

        Returns:
            What was seen of it; None: there was nothing to learn from.
        """
        ...


class Stepped(NamedTuple):
    """An optimizer that takes a step."""

    position: int
    """Among the module's optimizers."""
    role: str
    """What metrics call it."""
    max_grad_norm: float
    freeze_steps: int
    """Iterations at the start in which it waits."""

    def waits(self, it: Iteration) -> bool:
        """Whether its model stays as it is in this iteration."""
        return it.step < self.freeze_steps


class GradientStep:
    """Accumulates the gradient of a minibatch and lets optimizers step.

    The minibatch is cut into micro-batches whose losses add up to that of the whole: the
    denominators are those of the optimizer step over all ranks, so no cut changes the gradient. The
    one exception is the load-balancing loss of a mixture of experts, which is no sum over tokens:
    it is computed per micro-batch, and weighted by its tokens.

    Args:
        stage: What dumps call the step.
        models: What the rows go through.
        tokenizer: Writes the rows of a dump.
        settings: Of the run.
    """

    def __init__(
        self,
        stage: str,
        models: Sequence[PreTrainedModel | PeftModel],
        tokenizer: PreTrainedTokenizerBase,
        settings: PolicySettings,
    ) -> None:
        self.stage = stage
        self._models = list(models)
        self._tokenizer = tokenizer
        self._settings = settings

    @staticmethod
    def denominators(part: Experience, it: Iteration) -> Denominators:
        """Count what the sums of an optimizer step are divided by, over all ranks."""
        return Denominators(*it.ranks.sum(denominators(part).to(it.device)))

    def take(
        self,
        part: Experience,
        text: SequenceBatch | None,
        it: Iteration,
        context: UpdateContext,
        *,
        loss_of: Callable[[Experience, float, StepWatch], Tensor],
        optimizers: Sequence[Stepped],
        text_loss: Callable[[], Tensor] | None = None,
    ) -> StepWatch:
        """Take the step, unless the guard objects.

        Args:
            part: The minibatch.
            text: Only kept for a dump.
            it: The iteration.
            context: Only kept for a dump.
            loss_of: A micro-batch's share of the step's loss, the shares adding up to it; gets the
                micro-batch on the device, its weight in metrics that are means over micro-batches,
                and the watch to show its outputs to.
            optimizers: That step, in this order.
            text_loss: A further share that no response belongs to.

        Returns:
            What was seen of it.
        """
        seeds = it.seed_optimizer_step()
        guard = it.module.step_guard
        watch = StepWatch(guard.settings, rows=len(part), device=it.device, replayed=context.stored)
        self._accumulate(part, it, watch, loss_of, text_loss)
        found = self._step(it, watch, optimizers)
        if found is not None:

            def bundle() -> StepBundle:
                batches = {"part": part, "text": text}
                return StepBundle(
                    stage=self.stage,
                    batches={name: one for name, one in batches.items() if one is not None},
                    seeds=[seeds],
                    context=context._asdict(),
                    records=describe_rows(part, self._tokenizer, watch.log_ratios),
                )

            guard.report(found, bundle, it.module)
        return watch

    def _accumulate(
        self,
        part: Experience,
        it: Iteration,
        watch: StepWatch,
        loss_of: Callable[[Experience, float, StepWatch], Tensor],
        text_loss: Callable[[], Tensor] | None,
    ) -> None:
        budget = it.module.token_budget
        micro_batches = plan_micro_batches(part, self._models, self._settings.update, it)
        share = 1 / len(micro_batches) / it.ranks.world_size
        if text_loss is not None:
            loss = text_loss()
            watch.see_loss(loss, lambda: "in the pretraining texts")
            # not as the last: ranks add up the gradients of what the last pass goes through
            self._backward(loss, it, last=False)
        for index, one in enumerate(micro_batches):
            it.metrics.add("perf/padding_fraction", one.padding, one.computed)
            it.metrics.add("perf/shared_fraction", one.shared, one.given)
            micro = trim(part.select(one.rows)).to(it.device)
            watch.turn_to(one.rows)
            # the first is the largest
            measured = budget.measuring(one.computed, it.device) if index == 0 else nullcontext()
            with measured:
                loss = loss_of(micro, share, watch)
                # what it shows is large, and says nothing of the place
                place = partial(place_in, replace(micro, media=None), watch, self._tokenizer)
                watch.see_loss(loss, place)
                # also where it is not finite: no rank may leave the others alone in a reduction
                self._backward(loss, it, last=index == len(micro_batches) - 1)

    @staticmethod
    def _backward(loss: Tensor, it: Iteration, *, last: bool) -> None:
        # ranks' gradients are averaged, while the denominators already span all ranks
        it.module.gradients.backward(loss * it.ranks.world_size, last=last)

    @staticmethod
    def _step(
        it: Iteration, watch: StepWatch, optimizers: Sequence[Stepped]
    ) -> list[Anomaly] | None:
        """Step every optimizer; returns what this rank knows of a step that was left out."""
        verdict = watch.judge(it.ranks)
        found, left_out = list(verdict.found), verdict.skips
        for one in optimizers:
            norm = it.module.gradients.step(
                it.module.optimizer_of(one.position),
                max_grad_norm=one.max_grad_norm,
                leave_out=verdict.skips,
            )
            if verdict.skips:
                continue
            if math.isfinite(norm):
                it.metrics.add(f"{one.role}/grad_norm", norm, 1.0)
            elif not uses_loss_scaler(it.trainer):
                left_out = True
                if it.ranks.rank == 0:  # the norm is the same on all
                    found.append(Anomaly("gradient", f"the {one.role} gradient is not finite"))
        return found if left_out else None


class PolicyStep:
    """Takes the policy's optimizer step on a minibatch.

    Args:
        policy: The model; its optimizer is the module's first.
        tokenizer: Writes the rows of a dump.
        settings: Of the run.
    """

    stage = "policy"

    def __init__(
        self,
        policy: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: PolicySettings,
    ) -> None:
        self.objective = PolicyObjective(policy, settings)
        update = settings.update
        self.stepped = Stepped(0, "policy", update.max_grad_norm, update.freeze_steps)
        self._gradient = GradientStep(self.stage, [policy], tokenizer, settings)

    def __call__(
        self, part: Experience, text: SequenceBatch | None, it: Iteration, context: UpdateContext
    ) -> StepWatch | None:
        totals = self._gradient.denominators(part, it)
        # a step without a gradient would still move the weights by the optimizer's momentum
        if self.stepped.waits(it) or (float(totals.tokens) == 0 and text is None):
            return None

        def loss_of(micro: Experience, share: float, watch: StepWatch) -> Tensor:
            return self.objective.loss(micro, share, watch, totals=totals, it=it, context=context)[
                0
            ]

        return self._gradient.take(
            part,
            text,
            it,
            context,
            loss_of=loss_of,
            optimizers=[self.stepped],
            text_loss=self.objective.text_loss(text, it),
        )
