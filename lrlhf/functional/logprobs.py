"""Log-probabilities of tokens from hidden states, without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from lrlhf.functional.linear_logprobs import LinearHead, linear_logprobs
from lrlhf.functional.online_softmax import (
    OnlineSoftmax,
    RowGradients,
    Support,
    kernels_on,
    logits_gradient,
)

OutputHead: TypeAlias = Callable[[Tensor], Tensor]
"""Hidden states ``[N, H]`` to logits ``[N, V]``."""


class LogprobsAndEntropy(NamedTuple):
    """Of the same shape, at least float32, in nats."""

    logprobs: Float[Tensor, "*dims"]
    entropy: Float[Tensor, "*dims"]
    """Of the whole next-token distribution."""


class TokenStatistics(NamedTuple):
    """What the distribution over the next token says of each target."""

    logprobs: Float[Tensor, "*dims"]
    """At least float32, in nats."""
    entropy: Float[Tensor, "*dims"] | None
    """Of the distribution over all ids, or over the support; None: not asked for."""
    is_top: Bool[Tensor, "*dims"]
    """Whether no other token is more probable."""


@overload
def token_logprobs(
    hidden: Float[Tensor, "N H"],
    lm_head: Float[Tensor, "V H"] | LinearHead | OutputHead,
    targets: Int[Tensor, " N"],
    *,
    temperature: float = ...,
    chunk_size: int = ...,
    return_entropy: Literal[False] = ...,
) -> Float[Tensor, " N"]: ...
@overload
def token_logprobs(
    hidden: Float[Tensor, "N H"],
    lm_head: Float[Tensor, "V H"] | LinearHead | OutputHead,
    targets: Int[Tensor, " N"],
    *,
    temperature: float = ...,
    chunk_size: int = ...,
    return_entropy: Literal[True],
) -> LogprobsAndEntropy: ...
@overload
def token_logprobs(
    hidden: Float[Tensor, "N H"],
    lm_head: Float[Tensor, "V H"] | LinearHead | OutputHead,
    targets: Int[Tensor, " N"],
    *,
    temperature: float = ...,
    chunk_size: int = ...,
    return_entropy: bool,
) -> Float[Tensor, " N"] | LogprobsAndEntropy: ...
def token_logprobs(
    hidden: Float[Tensor, "N H"],
    lm_head: Float[Tensor, "V H"] | LinearHead | OutputHead,
    targets: Int[Tensor, " N"],
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    return_entropy: bool = False,
) -> Float[Tensor, " N"] | LogprobsAndEntropy:
    """Log-probability of each target token under the logits of its hidden state.

        logprobs[n] = z[n, targets[n]] - log Σ_v exp z[n, v]      with z = logits / temperature

    Logits of at most ``chunk_size`` rows exist at the same time, and while a head is applied those
    of one block more. The backward pass computes the rest again; where there are no more rows, or
    the hidden states alone are trained, it computes none. The matrix products follow autocast; the
    log-softmax is float32, or float64 for such logits. A weight is faster than a module that holds
    it; a module whose hooks gather or adapt the weight (sharding, LoRA) must be passed itself.

    Args:
        hidden: Hidden state that predicts each token.
        lm_head: Weight of the output projection, perhaps with what a `LinearHead` does to its
            logits; or what turns hidden states into logits row by row: a module, soft-capping
            included.
        targets: Id of each token.
        temperature: Sampling temperature that the policy is trained at.
        chunk_size: Rows whose logits may exist at the same time.
        return_entropy: Also return the entropy of every row's distribution.

    Raises:
        ValueError: ``temperature`` or ``chunk_size`` is not positive.
    """
    logprobs, entropy, _ = token_statistics(
        hidden,
        lm_head,
        targets,
        temperature=temperature,
        chunk_size=chunk_size,
        return_entropy=return_entropy,
    )
    return logprobs if entropy is None else LogprobsAndEntropy(logprobs, entropy)


def token_statistics(
    hidden: Float[Tensor, "N H"],
    lm_head: Float[Tensor, "V H"] | LinearHead | OutputHead,
    targets: Int[Tensor, " N"],
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    return_entropy: bool = False,
    support: Support | None = None,
) -> TokenStatistics:
    """Compute what `token_logprobs` does, and whether each target is the most probable token.

        logprobs[n] = z[n, targets[n]] - log Σ_{v ∈ S_n} exp z[n, v]

    ``support`` has the ids S_n that truncated sampling left, the target among them; None: all ids.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be 1 or more")
    if isinstance(lm_head, Tensor):
        lm_head = LinearHead(weight=lm_head)
    if isinstance(lm_head, LinearHead):
        statistics = linear_logprobs(
            hidden,
            lm_head,
            targets,
            temperature=temperature,
            chunk_size=chunk_size,
            return_entropy=return_entropy,
            support=support,
        )
    else:
        statistics = _head_logprobs(
            hidden, lm_head, targets, temperature, chunk_size, return_entropy, support
        )
    return TokenStatistics(*statistics)


def _head_logprobs(
    hidden: Float[Tensor, "N H"],
    head: OutputHead,
    targets: Int[Tensor, " N"],
    temperature: float,
    chunk_size: int,
    return_entropy: bool,
    support: Support | None,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None, Bool[Tensor, " N"]]:
    def of_chunk(rows: Tensor, ids: Tensor, start: int) -> Any:
        own = support and support.select(slice(start, start + len(ids)))
        return _LogitsLogprob.apply(  # type: ignore[no-untyped-call]
            head(rows), ids, temperature, return_entropy, own
        )

    parts = []
    chunks = list(
        zip(torch.split(hidden, chunk_size), torch.split(targets, chunk_size), strict=True)
    )
    for number, (rows, ids) in enumerate(chunks, start=1):
        # The head may hold trained parameters of its own, so only the grad mode decides. The last
        # chunk's logits would be computed again first of all: keeping them needs no more memory.
        start = (number - 1) * chunk_size
        if torch.is_grad_enabled() and number < len(chunks):
            parts.append(checkpoint(of_chunk, rows, ids, start, use_reentrant=False))
        else:
            parts.append(of_chunk(rows, ids, start))
    logprobs, is_top = (torch.cat([part[column] for part in parts]) for column in (0, 2))
    return logprobs, torch.cat([part[1] for part in parts]) if return_entropy else None, is_top


class _LogitsLogprob(torch.autograd.Function):
    """Log-softmax at one index per row; saves the logits as they came and two numbers per row."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        return_entropy: bool,
        support: Support | None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.support = 1 / temperature, support
        scratch = _scratch(logits, return_entropy)
        wide = torch.promote_types(logits.dtype, torch.float32)
        softmax = OnlineSoftmax(targets, wide, entropy=return_entropy, scale=ctx.scale)
        restricted = _restricted(logits, support, scratch[0])
        softmax.add(restricted, scratch, rows=slice(None), start=0)
        result = softmax.result()
        ctx.save_for_backward(logits, targets, result.normalizer, result.entropy)
        ctx.mark_non_differentiable(result.is_top)
        return result.logprobs, result.entropy, result.is_top

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _of_is_top: None
    ) -> tuple[Tensor | None, None, None, None, None]:
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None, None
        logits, targets, normalizer, entropy = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalizer)
        rows = RowGradients(targets, normalizer, entropy, grad_logprobs, grad_entropy, ctx.scale)
        scratch = _scratch(logits, grad_entropy is not None)
        restricted = _restricted(logits, ctx.support, scratch[0])
        gradient = logits_gradient(restricted, scratch, rows.scaled(ctx.scale), start=0)
        return gradient.to(logits.dtype), None, None, None, None


def _restricted(logits: Tensor, support: Support | None, out: Tensor) -> Float[Tensor, "C V"]:
    """Return the logits, which are not ours, or what a support leaves of them in ``out``."""
    if support is None:
        return logits.contiguous()
    support.restrict(out.copy_(logits))
    return out


def _scratch(logits: Float[Tensor, "C V"], entropy: bool) -> list[Tensor]:
    if kernels_on(logits.device):
        return [torch.empty_like(logits, memory_format=torch.contiguous_format)]
    wide = torch.promote_types(logits.dtype, torch.float32)
    return [torch.empty_like(logits, dtype=wide) for _ in range(2 if entropy else 1)]
