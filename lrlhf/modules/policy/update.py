"""Optimizer steps: minibatches, micro-batches, backward passes, the guard, clip and step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.guard.anomalies import StepWatch, locate, locate_in
from lrlhf.guard.dump import StepBundle
from lrlhf.models import cached_vision_features, packs, placeholder_ids, plain_model
from lrlhf.modules.base import SteppedOptimizer
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.rollout import plan_micro_batches as plan_own
from lrlhf.rollout.minibatches import MicroBatch, minibatches, trim
from lrlhf.run.sequence_balancing import balance_over_ranks
from lrlhf.types import Experience, Rollout, SequenceBatch

if TYPE_CHECKING:
    from lrlhf.modules.policy.settings import PolicySettings

RowsT = TypeVar("RowsT", bound=SequenceBatch)


class OptimizerStep(Generic[RowsT]):
    """One step of one or several optimizers, by gradient accumulation over micro-batches.

    Iterating over it yields the micro-batches on the device, of each of which the caller computes
    its share of the loss, and ends with the step itself, unless the guard objects:

        for micro in step:
            step.backward(loss(micro))

    The shares add up to the loss of the whole minibatch: the denominators are those of the
    optimizer step over all ranks, so no cut changes the gradient. The one exception is the
    load-balancing loss of a mixture of experts, which is no sum over tokens: it is computed per
    micro-batch, and weighted by its tokens.

    Args:
        part: The rows of this rank.
        it: The iteration.
        optimizers: That step, in this order.
        stage: What dumps call the step.
        models: What the rows go through.
        tokenizer: Writes the place of an entry that is not finite.
        max_tokens: Tokens of one forward pass, see `Update.micro_batch_tokens`.
        shared: Whether rows of one group may share what they begin with.
        describe: Describes the rows of a dump in JSON types.
        text: Further rows, kept in a dump.
        text_loss: A further share, which no row belongs to.
    """

    def __init__(  # noqa: PLR0913  what a step is made of
        self,
        part: RowsT,
        it: Iteration,
        optimizers: Sequence[SteppedOptimizer],
        *,
        stage: str,
        models: Sequence[PreTrainedModel | PeftModel],
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int | Literal["auto"] | None,
        shared: bool,
        describe: Callable[[RowsT, StepWatch], list[dict[str, Any]]],
        text: SequenceBatch | None = None,
        text_loss: Callable[[], Tensor] | None = None,
    ) -> None:
        self._part, self._it, self._optimizers = part, it, optimizers
        self._stage, self._models, self._tokenizer = stage, models, tokenizer
        self._max_tokens, self._shared, self._describe = max_tokens, shared, describe
        self._text, self._text_loss = text, text_loss
        guard = it.module.step_guard.settings
        self.watch = StepWatch(guard, rows=len(part), device=it.device)
        """What the guard sees of it."""
        self.share = 1.0
        """Weight of the present micro-batch in metrics that are means over micro-batches."""

    def __iter__(self) -> Iterator[RowsT]:
        it, part = self._it, self._part
        seeds = it.seed_optimizer_step()
        micro_batches = plan_micro_batches(
            part, self._models, it, max_tokens=self._max_tokens, shared=self._shared
        )
        self.share = 1 / len(micro_batches) / it.ranks.world_size
        it.costs.count(self._models, part.lengths.cpu(), micro_batches)
        if self._text_loss is not None:
            loss = self._text_loss()
            self.watch.see_loss(loss, lambda: "in the pretraining texts")
            # not as the last: ranks add up the gradients of what the last pass goes through
            self._accumulate(loss, last=False)
        for index, one in enumerate(micro_batches):
            it.metrics.add("perf/padding_fraction", one.padding, one.computed)
            it.metrics.add("perf/shared_fraction", one.shared, one.tokens)
            micro = trim(part.select(one.rows)).to(it.device)
            self._micro, self._last = micro, index == len(micro_batches) - 1
            self.watch.turn_to(one.rows)
            budget = it.module.token_budget
            # the first is the largest
            measured = budget.measuring(one.computed, it.device) if index == 0 else nullcontext()
            with measured:
                yield micro
        it.module.step_optimizers(
            self._optimizers,
            self.watch.judge(it.ranks),
            metrics=it.metrics,
            bundle=lambda: self._bundle(seeds),
        )

    def backward(self, loss: Tensor) -> None:
        """Go backward from the present micro-batch's share of the loss."""
        # images are large, and say nothing of the place
        rows = replace(self._micro, media=None)
        self.watch.see_loss(loss, partial(self._place_in, rows))
        # also where it is not finite: no rank may leave the others alone in a reduction
        self._accumulate(loss, last=self._last)

    def _accumulate(self, loss: Tensor, *, last: bool) -> None:
        # ranks' gradients are averaged, while the denominators already span all ranks
        self._it.module.gradients.backward(loss * self._it.ranks.world_size, last=last)

    def _place_in(self, rows: RowsT) -> str:
        """Say where the first entry is that is not finite; empty: nowhere."""
        watch = self.watch
        location = locate(rows, watch.outputs, tokenizer=self._tokenizer, rows=watch.rows)
        if not location and isinstance(rows, Experience):
            return locate_in(rows, self._tokenizer)
        return location

    def _bundle(self, seeds: tuple[int, ...]) -> StepBundle:
        batches: dict[str, SequenceBatch] = {"part": self._part}
        return StepBundle(
            stage=self._stage,
            batches=batches if self._text is None else {**batches, "text": self._text},
            seeds=[seeds],
            context={},
            records=self._describe(self._part, self.watch),
        )


def minibatches_of(
    experience: Experience,
    texts: SequenceBatch | None,
    settings: PolicySettings,
    models: Sequence[nn.Module],
    it: Iteration,
) -> Iterator[tuple[Experience, SequenceBatch | None]]:
    """Yield the minibatches of all epochs over an experience, rows balanced over the ranks.

    Args:
        experience: Of this rank.
        texts: Pretraining texts, split over the minibatches of an epoch; None: there are none.
        settings: How many epochs and minibatches.
        models: What is trained; put into training mode.
        it: The iteration.
    """
    for model in models:
        model.train()
    experience = replace(experience, columns=None)  # the advantages are made of them
    if settings.teacher is None or settings.teacher.placement == "reward":  # so are they of these
        experience = replace(experience, privileged=None)
    size = settings.minibatch_rows(len(experience), it.ranks)
    split = _split_texts(texts, len(experience) // size)
    for _ in range(settings.update.num_iterations):
        for part, text in zip(minibatches(experience, size=size), split, strict=True):
            balanced = balance_over_ranks(part, it.ranks)
            it.metrics.add("perf/token_imbalance", balanced.after, 1.0)
            # features that nothing is trained for are computed once per step, the others once per
            # micro-batch
            with cached_vision_features():
                yield balanced.rows, text


def _split_texts(texts: SequenceBatch | None, steps: int) -> list[SequenceBatch | None]:
    """Split the pretraining texts over the optimizer steps of one epoch."""
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


def plan_micro_batches(
    part: SequenceBatch,
    models: Sequence[PreTrainedModel | PeftModel],
    it: Iteration,
    *,
    max_tokens: int | Literal["auto"] | None,
    shared: bool,
) -> list[MicroBatch]:
    """Cut rows into the micro-batches that go through some models.

    Where weights are split, all ranks take part in gathering them, micro-batch by micro-batch.

    Args:
        part: Rows of this rank.
        models: What each micro-batch goes through.
        it: The ranks.
        max_tokens: Tokens that a micro-batch may have, see `Update.micro_batch_tokens`.
        shared: Whether rows of one group may share what they begin with.
    """
    limit = it.module.token_budget.limit(max_tokens, it.device)
    if isinstance(part, Rollout) and part.privileged is not None and part.teacher is None:
        # the rows of the teacher, too, go through a model together
        part = _longer_rows(part, part.privileged)
    plain = [plain_model(model) for model in models]
    plan = partial(
        plan_own,
        part,
        max_tokens=limit,
        packed=all(packs(model, part) for model in plain),
        shared=shared,
        placeholders=placeholder_ids(plain[0].config),
    )
    own = plan()
    if it.ranks.world_size == 1 or limit is None:
        return own
    most = it.ranks.max(torch.tensor(float(len(own)), device=it.device))
    return own if int(most) == len(own) else plan(at_least=int(most))


def _longer_rows(first: SequenceBatch, second: SequenceBatch) -> SequenceBatch:
    """Take the longer one of two rows each, of batches that a model reads in turn."""
    longer = (second.lengths > first.lengths)[:, None]
    width = max(first.input_ids.shape[1], second.input_ids.shape[1])

    def chosen(one: Tensor, other: Tensor) -> Tensor:
        one, other = (functional.pad(rows, (0, width - rows.shape[1])) for rows in (one, other))
        return torch.where(longer, other, one)

    return SequenceBatch(
        input_ids=chosen(first.input_ids, second.input_ids),
        attention_mask=chosen(first.attention_mask, second.attention_mask),
        response_mask=chosen(first.response_mask, second.response_mask),
        group_ids=first.group_ids,
    )
