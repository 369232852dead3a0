"""Log-probabilities of tokens from hidden states, without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

OutputHead: TypeAlias = Callable[[Tensor], Tensor]
"""Hidden states ``[N, H]`` to logits ``[N, V]``."""


class LogprobsAndEntropy(NamedTuple):
    """Of the same shape, at least float32, in nats."""

    logprobs: Float[Tensor, "*dims"]
    entropy: Float[Tensor, "*dims"]
    """Of the whole next-token distribution."""


@overload
def token_logprobs(
    hidden: Float[Tensor, "N H"],
    lm_head: Float[Tensor, "V H"] | OutputHead,
    targets: Int[Tensor, " N"],
    *,
    temperature: float = ...,
    chunk_size: int = ...,
    return_entropy: Literal[False] = ...,
) -> Float[Tensor, " N"]: ...
@overload
def token_logprobs(
    hidden: Float[Tensor, "N H"],
    lm_head: Float[Tensor, "V H"] | OutputHead,
    targets: Int[Tensor, " N"],
    *,
    temperature: float = ...,
    chunk_size: int = ...,
    return_entropy: Literal[True],
) -> LogprobsAndEntropy: ...
@overload
def token_logprobs(
    hidden: Float[Tensor, "N H"],
    lm_head: Float[Tensor, "V H"] | OutputHead,
    targets: Int[Tensor, " N"],
    *,
    temperature: float = ...,
    chunk_size: int = ...,
    return_entropy: bool,
) -> Float[Tensor, " N"] | LogprobsAndEntropy: ...
def token_logprobs(
    hidden: Float[Tensor, "N H"],
    lm_head: Float[Tensor, "V H"] | OutputHead,
    targets: Int[Tensor, " N"],
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    return_entropy: bool = False,
) -> Float[Tensor, " N"] | LogprobsAndEntropy:
    """Log-probability of each target token under the logits of its hidden state.

        logprobs[n] = z[n, targets[n]] - log Σ_v exp z[n, v]      with z = logits / temperature

    Logits exist for one chunk at a time, in the forward pass and, computed again, in the backward
    pass. The matrix product follows autocast; the log-softmax is float32, or float64 for such
    logits.

    Args:
        hidden: Hidden state that predicts each token.
        lm_head: Weight of the output projection, or what turns hidden states into logits row by
            row: a module, soft-capping included.
        targets: Id of each token.
        temperature: Sampling temperature that the policy is trained at.
        chunk_size: Rows whose logits exist at the same time.
        return_entropy: Also return the entropy of every row's distribution.

    Raises:
        ValueError: ``temperature`` or ``chunk_size`` is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be 1 or more")
    head = _projection(lm_head) if isinstance(lm_head, Tensor) else lm_head

    def chosen(rows: Tensor, ids: Tensor) -> Any:
        return _ChosenLogprob.apply(  # type: ignore[no-untyped-call]
            head(rows), ids, temperature, return_entropy
        )

    parts = []
    for rows, ids in zip(
        torch.split(hidden, chunk_size), torch.split(targets, chunk_size), strict=True
    ):
        if torch.is_grad_enabled():
            parts.append(checkpoint(chosen, rows, ids, use_reentrant=False))
        else:
            parts.append(chosen(rows, ids))
    logprobs = torch.cat([part[0] for part in parts])
    if not return_entropy:
        return logprobs
    return LogprobsAndEntropy(logprobs, torch.cat([part[1] for part in parts]))


def _projection(weight: Float[Tensor, "V H"]) -> OutputHead:
    return lambda hidden: F.linear(hidden, weight)


class _ChosenLogprob(torch.autograd.Function):
    """Log-softmax at one index per row; saves the logits as they came and one number per row."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, return_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        scaled = _scaled(logits, temperature)
        chosen = scaled.gather(1, targets[:, None])[:, 0]
        largest = scaled.amax(dim=1)
        # in place, because at this size every further copy costs as much as the arithmetic
        sums = scaled.sub_(largest[:, None]).exp_().sum(dim=1)
        normalizer = sums.log() + largest
        entropy = None
        if return_entropy:
            entropy = torch.special.entr(scaled.div_(sums[:, None])).sum(dim=1)
        ctx.temperature = temperature
        ctx.save_for_backward(logits, targets, normalizer, entropy)
        return chosen - normalizer, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        logits, targets, normalizer, entropy = ctx.saved_tensors
        p = _scaled(logits, ctx.temperature).sub_(normalizer[:, None]).exp_()
        if grad_entropy is None:
            grad = p.mul_(-grad_logprobs[:, None])
        else:
            # dH/dz = -p (log p + H), where entr(p) = -p log p is 0 at p = 0
            grad = torch.special.entr(p).mul_(grad_entropy[:, None])
            grad.sub_(p.mul_((entropy * grad_entropy + grad_logprobs)[:, None]))
        grad.scatter_add_(1, targets[:, None], grad_logprobs[:, None])
        return grad.div_(ctx.temperature).to(logits.dtype), None, None, None


def _scaled(logits: Float[Tensor, "C V"], temperature: float) -> Float[Tensor, "C V"]:
    """Make a copy that may be changed in place."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    copied = logits.detach().to(dtype, copy=True)
    return copied if temperature == 1.0 else copied.div_(temperature)
