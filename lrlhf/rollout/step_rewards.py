"""What steps of responses have earned, at the tokens that end them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from lrlhf.rewards import CompletionText, RewardResult
from lrlhf.rollout.texts import text_ends
from lrlhf.types import PromptBatch, Rollout


def with_step_rewards(
    rollout: Rollout,
    prompts: PromptBatch,
    rewards: RewardResult,
    texts: Sequence[CompletionText],
    tokenizer: PreTrainedTokenizerBase,
) -> Rollout:
    """Add what rewards found single steps to be worth to what environments gave for turns.

    Args:
        rollout: Responses, rows of one prompt consecutive.
        prompts: The unique prompts.
        rewards: Of the responses.
        texts: Of the responses, as the rewards read them.
        tokenizer: The policy's.
    """
    if rewards.step_rewards is None:
        return rollout
    ends = [[step.end for step in steps] for steps in rewards.step_rewards]
    placed = torch.zeros(rollout.input_ids.shape)
    columns = text_ends(prompts, rollout, tokenizer, texts, ends)
    for row, (own, steps) in enumerate(zip(columns, rewards.step_rewards, strict=True)):
        for column, step in zip(own, steps, strict=True):
            placed[row, column] += step.value
    placed = placed.to(rollout.input_ids.device)
    given = rollout.turn_rewards
    return replace(rollout, turn_rewards=placed if given is None else given + placed)
