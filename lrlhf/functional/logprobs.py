"""Log-probabilities of chosen tokens without the whole table of logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class LogprobsAndEntropy(NamedTuple):
    """Of the chosen tokens, and of the distributions that they were chosen from."""

    logprobs: Tensor
    entropy: Tensor
    """In nats."""


LanguageHead = Tensor | Callable[[Tensor], Tensor]
"""A weight `[V, H]`, or a function from hidden states `[N, H]` to logits `[N, V]`."""


@overload
def token_logprobs(
    hidden: Tensor,
    lm_head: LanguageHead,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    return_entropy: Literal[False] = False,
) -> Tensor: ...


@overload
def token_logprobs(
    hidden: Tensor,
    lm_head: LanguageHead,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    return_entropy: Literal[True],
) -> LogprobsAndEntropy: ...


@overload
def token_logprobs(
    hidden: Tensor,
    lm_head: LanguageHead,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    return_entropy: bool,
) -> Tensor | LogprobsAndEntropy: ...


def token_logprobs(
    hidden: Float[Tensor, "N H"],
    lm_head: LanguageHead,
    targets: Int[Tensor, " N"],
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    return_entropy: bool = False,
) -> Tensor | LogprobsAndEntropy:
    """Log-softmax of the chosen tokens, a chunk of tokens at a time.

    Logits of one chunk exist at a time: they are thrown away after the forward pass and computed
    again in the backward pass, so that memory grows with ``chunk_size`` times the vocabulary
    instead of all tokens times the vocabulary.

    Args:
        hidden: Hidden states that predict the targets.
        lm_head: Output weight, or a function from hidden states to logits.
        targets: Token ids.
        temperature: Divides the logits.
        chunk_size: Tokens whose logits exist at the same time.
        return_entropy: Also return the entropy of each distribution, with gradient.

    Returns:
        `[N]`, float64 for float64 input and float32 for anything else; with ``return_entropy``
        the pair of log-probabilities and entropies.

    Raises:
        ValueError: ``temperature`` or ``chunk_size`` is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be 1 or more")
    head = _linear(lm_head) if isinstance(lm_head, Tensor) else lm_head

    def compute(states: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return _of_chunk(head(states), chosen, temperature, return_entropy)

    # a head may hold trained parameters of its own, so only the grad mode decides
    recompute = torch.is_grad_enabled()
    parts = [
        checkpoint(compute, states, chosen, use_reentrant=False, preserve_rng_state=False)
        if recompute
        else compute(states, chosen)
        for states, chosen in zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True)
    ]
    logprobs, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    return LogprobsAndEntropy(logprobs, entropy) if return_entropy else logprobs


def _linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    def head(states: Tensor) -> Tensor:
        return F.linear(states, weight)

    return head


def _of_chunk(
    logits: Tensor, chosen: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    # 16-bit logits carry about three digits: too few for the difference of two large numbers
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    normalizer = logits.logsumexp(dim=-1)
    logprobs = logits.gather(-1, chosen[:, None])[:, 0] - normalizer
    if not with_entropy:
        return logprobs, logprobs.detach()
    probabilities = (logits - normalizer[:, None]).exp()
    # a masked-out token (-inf) has probability 0 and adds nothing
    weighted = torch.where(probabilities > 0, probabilities * logits, torch.zeros_like(logits))
    return logprobs, normalizer - weighted.sum(dim=-1)
