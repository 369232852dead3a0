"""Log-probabilities that a language model gives to the tokens of a batch."""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch
from jaxtyping import Bool, Float, Int
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from lrlhf.functional.logprobs import LogprobsAndEntropy, token_logprobs
from lrlhf.models.output_head import output_head, plain_model
from lrlhf.types import SequenceBatch


class Compacted(NamedTuple):
    """Rows whose attended tokens come first, in order, with nothing between them."""

    input_ids: Int[Tensor, "B T"]
    attention_mask: Bool[Tensor, "B T"]
    order: Int[Tensor, "B T"]
    """Column in the original row of every column here."""


def compact(input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"]) -> Compacted:
    """Move the attended tokens of every row to its start, in order.

    Right-padded rows stay as they are. After it every model family numbers positions rightly by
    itself, whether the padding was at the left, at the right or in the middle.
    """
    order = torch.argsort((~attention_mask).to(torch.uint8), dim=1, stable=True)
    return Compacted(input_ids.gather(1, order), attention_mask.gather(1, order), order)


@overload
def sequence_logprobs(
    model: PreTrainedModel | PeftModel,
    batch: SequenceBatch,
    *,
    temperature: float = ...,
    chunk_size: int = ...,
    return_entropy: Literal[False] = ...,
) -> Float[Tensor, "B T"]: ...
@overload
def sequence_logprobs(
    model: PreTrainedModel | PeftModel,
    batch: SequenceBatch,
    *,
    temperature: float = ...,
    chunk_size: int = ...,
    return_entropy: Literal[True],
) -> LogprobsAndEntropy: ...
def sequence_logprobs(
    model: PreTrainedModel | PeftModel,
    batch: SequenceBatch,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    return_entropy: bool = False,
) -> Float[Tensor, "B T"] | LogprobsAndEntropy:
    """Compute ``log p(input_ids[b, t] | what precedes it)`` on the response tokens.

    The body runs once over the batch. The output head sees only the positions that predict a
    response token, in chunks that the backward pass recomputes, so ``[B, T, V]`` never exists.

    Args:
        model: A causal language model, with or without LoRA adapters.
        batch: Tokens outside ``attention_mask`` are invisible, wherever they are.
        temperature: Logits are divided by it.
        chunk_size: Positions whose logits exist at the same time.
        return_entropy: Also return the entropy of every next-token distribution, in nats.

    Returns:
        ``[B, T]``, at least float32; 0 outside ``response_mask`` and on a row's first token.
    """
    plain = plain_model(model)
    rows = compact(batch.input_ids, batch.attention_mask)
    hidden = plain.base_model(
        input_ids=rows.input_ids,
        attention_mask=rows.attention_mask.long(),
        use_cache=False,
    ).last_hidden_state
    counts = (batch.response_mask & batch.attention_mask).gather(1, rows.order)
    counts[:, 0] = False  # nothing precedes it
    asked = _at_least_one(counts)
    result = token_logprobs(
        hidden[:, :-1][asked[:, 1:]],
        output_head(plain),
        rows.input_ids[asked],
        temperature=temperature,
        chunk_size=chunk_size,
        return_entropy=return_entropy,
    )
    if isinstance(result, LogprobsAndEntropy):
        return LogprobsAndEntropy(
            _spread(result.logprobs, asked, counts, rows.order),
            _spread(result.entropy, asked, counts, rows.order),
        )
    return _spread(result, asked, counts, rows.order)


def _at_least_one(counts: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Ask for one position of a batch without responses, so that every parameter is used.

    Under DDP a parameter without a gradient on one rank stops all of them. Its value is masked.
    """
    asked = counts.clone()
    asked[:1, 1:2] |= ~counts.any()
    return asked


def _spread(
    values: Float[Tensor, " N"],
    asked: Bool[Tensor, "B T"],
    counts: Bool[Tensor, "B T"],
    order: Int[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """Put the values where they were asked for, zero elsewhere, in the original columns."""
    spread = torch.zeros(asked.shape, dtype=values.dtype, device=values.device)
    spread = spread.masked_scatter(asked, values).masked_fill(~counts, 0.0)
    return torch.zeros_like(spread).scatter(1, order, spread)
