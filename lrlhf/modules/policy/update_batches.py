"""An experience cut up for its update: minibatches, and as many micro-batches on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from lrlhf.models import looking_once, packs, plain_model
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.policy_settings import PolicySettings
from lrlhf.rollout import plan_micro_batches as plan_own
from lrlhf.rollout.minibatches import MicroBatch, minibatches, trim
from lrlhf.run.sequence_balancing import balance_over_ranks
from lrlhf.types import Experience, SequenceBatch


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
    size = settings.minibatch_rows(len(experience), it.ranks)
    split = _split_texts(texts, len(experience) // size)
    for _ in range(settings.update.num_iterations):
        for part, text in zip(minibatches(experience, size=size), split, strict=True):
            balanced = balance_over_ranks(part, it.ranks)
            it.metrics.add("perf/token_imbalance", balanced.after, 1.0)
            # features that nothing is trained for are computed once per step, the others once per
            # micro-batch
            with looking_once():
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
    plan = partial(
        plan_own,
        part,
        max_tokens=limit,
        packed=all(packs(plain_model(model), part) for model in models),
        shared=shared,
    )
    own = plan()
    if it.ranks.world_size == 1 or limit is None:
        return own
    most = it.ranks.max(torch.tensor(float(len(own)), device=it.device))
    return own if int(most) == len(own) else plan(at_least=int(most))
