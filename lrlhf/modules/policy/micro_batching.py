"""Rows of one rank cut into micro-batches, equally many on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from lrlhf.models import packs, plain_model
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.settings import Update
from lrlhf.rollout import MicroBatch
from lrlhf.rollout import plan_micro_batches as plan_own
from lrlhf.types import SequenceBatch


def plan_micro_batches(
    part: SequenceBatch,
    models: Sequence[PreTrainedModel | PeftModel],
    update: Update,
    it: Iteration,
) -> list[MicroBatch]:
    """Cut rows into the micro-batches that go through some models.

    Where weights are split, all ranks take part in gathering them, micro-batch by micro-batch.

    Args:
        part: Rows of this rank.
        models: What each micro-batch goes through.
        update: How many tokens a micro-batch may have.
        it: The ranks.
    """
    plan = partial(
        plan_own,
        part,
        max_tokens=update.micro_batch_tokens,
        packed=all(packs(plain_model(model), part) for model in models),
        # experts are balanced over the tokens of whole rows
        shared=update.router_loss_coef == 0,
    )
    own = plan()
    if it.ranks.world_size == 1 or update.micro_batch_tokens is None:
        return own
    most = it.ranks.max(torch.tensor(float(len(own)), device=it.device))
    return own if int(most) == len(own) else plan(at_least=int(most))
