"""One optimizer step on rows: micro-batches, backward passes, the guard, clip and step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Generic, Literal, NamedTuple, TypeVar

from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from lrlhf.guard.anomalies import Anomaly
from lrlhf.guard.bundle import StepBundle
from lrlhf.guard.step_watch import StepWatch
from lrlhf.modules.checks import uses_loss_scaler
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.update_batches import plan_micro_batches
from lrlhf.rollout import trim
from lrlhf.types import SequenceBatch

RowsT = TypeVar("RowsT", bound=SequenceBatch)


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


class RowStep(Generic[RowsT]):
    """Accumulates the gradient of rows and lets optimizers step.

    The rows are cut into micro-batches whose losses add up to that of the whole: the denominators
    are those of the optimizer step over all ranks, so no cut changes the gradient. The one
    exception is the load-balancing loss of a mixture of experts, which is no sum over tokens: it is
    computed per micro-batch, and weighted by its tokens.

    Args:
        models: What the rows go through.
        max_tokens: Tokens of one forward pass, see `Update.micro_batch_tokens`.
        shared: Whether rows of one group may share what they begin with.
        place_of: Says where in a micro-batch, without its media, the first entry is that is not
            finite; empty: nowhere.
    """

    def __init__(
        self,
        models: Sequence[PreTrainedModel | PeftModel],
        *,
        max_tokens: int | Literal["auto"] | None,
        shared: bool,
        place_of: Callable[[RowsT, StepWatch], str],
    ) -> None:
        self._models = list(models)
        self._max_tokens, self._shared = max_tokens, shared
        self._place_of = place_of

    def take(
        self,
        part: RowsT,
        it: Iteration,
        *,
        loss_of: Callable[[RowsT, float, StepWatch], Tensor],
        optimizers: Sequence[Stepped],
        bundle: Callable[[tuple[int, ...], StepWatch], StepBundle],
        text_loss: Callable[[], Tensor] | None = None,
        replayed: bool = False,
    ) -> StepWatch:
        """Take the step, unless the guard objects.

        Args:
            part: The rows of this rank.
            it: The iteration.
            loss_of: A micro-batch's share of the step's loss, the shares adding up to it; gets the
                micro-batch on the device, its weight in metrics that are means over micro-batches,
                and the watch to show its outputs to.
            optimizers: That step, in this order.
            bundle: Makes what a dump keeps of the step, from its seeds and what was seen of it.
            text_loss: A further share that no row belongs to.
            replayed: Whether another run has stored the rows.

        Returns:
            What was seen of it.
        """
        seeds = it.seed_optimizer_step()
        guard = it.module.step_guard
        watch = StepWatch(guard.settings, rows=len(part), device=it.device, replayed=replayed)
        self._accumulate(part, it, watch, loss_of, text_loss)
        found = self._step(it, watch, optimizers)
        if found is not None:
            guard.report(found, lambda: bundle(seeds, watch), it.module)
        return watch

    def _accumulate(
        self,
        part: RowsT,
        it: Iteration,
        watch: StepWatch,
        loss_of: Callable[[RowsT, float, StepWatch], Tensor],
        text_loss: Callable[[], Tensor] | None,
    ) -> None:
        budget = it.module.token_budget
        micro_batches = plan_micro_batches(
            part, self._models, it, max_tokens=self._max_tokens, shared=self._shared
        )
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
                place = partial(self._place_of, replace(micro, media=None), watch)
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
