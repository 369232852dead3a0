"""What an update knows of each token of a response, in JSON types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.rollout.texts import token_texts
from lrlhf.types import Experience

_DIGITS = 4


def token_values(
    experience: Experience, row: int, token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[Any]]:
    """Describe the tokens of a response, given ones included.

    Args:
        experience: Of this rank, before the update.
        row: The response.
        token_ids: Its tokens, the last ones of the row.
        tokenizer: The policy's.

    Returns:
        Lists with an entry per token: ``texts`` (see `token_texts`), and the values that the update
        has: ``advantage``; ``engine_logprob``, of the weights and engine that sampled the token;
        ``logprob``, of the policy before its update, where it was computed; ``ref_logprob``;
        ``entropy``; ``value``; ``weight``, what the token's loss is multiplied by for the
        difference between engine and trainer. Values have four digits; they are None for tokens
        that were not sampled, and where they are not finite.
    """
    end = int(experience.attention_mask[row].nonzero().max()) + 1
    start = end - len(token_ids)
    sampled = experience.response_mask[row, start:end].tolist()
    own = experience.policy_logprobs
    columns = {
        "advantage": experience.advantages,
        "logprob": experience.old_logprobs if own is None else own,
        "engine_logprob": experience.engine_logprobs,
        "ref_logprob": experience.ref_logprobs,
        "entropy": experience.entropy,
        "value": experience.values,
        "weight": experience.importance_weights,
    }
    before = experience.input_ids[row, :start].tolist()
    return {
        "texts": token_texts(tokenizer, before, token_ids),
        **{
            name: _rounded(column[row, start:end], sampled)
            for name, column in columns.items()
            if column is not None
        },
    }


def _rounded(values: Tensor, sampled: Sequence[bool]) -> list[float | None]:
    return [
        float(f"{value:.{_DIGITS}g}") if counts and math.isfinite(value) else None
        for value, counts in zip(values.tolist(), sampled, strict=True)
    ]
