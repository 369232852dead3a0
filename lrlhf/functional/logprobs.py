"""Log-probabilities of tokens from hidden states, without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

OutputHead: TypeAlias = Callable[[Tensor], Tensor]
"""Hidden states ``[N, H]`` to logits ``[N, V]``."""


_FAR = -1e4
"""Lowest log-probability in an entropy. Below it p is 0 in float64 too, and so is p log p, while
0 · -inf would make NaN of a token that the head rules out."""


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
    logits. A weight is faster than a module that holds it; a module whose hooks gather or adapt
    the weight (sharding, LoRA) must be passed itself.

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
    if isinstance(lm_head, Tensor):
        logprobs, entropy = _LinearLogprob.apply(  # type: ignore[no-untyped-call]
            hidden, lm_head, targets, temperature, chunk_size, return_entropy
        )
    else:
        logprobs, entropy = _head_logprobs(
            hidden, lm_head, targets, temperature, chunk_size, return_entropy
        )
    return LogprobsAndEntropy(logprobs, entropy) if return_entropy else logprobs


def _head_logprobs(
    hidden: Float[Tensor, "N H"],
    head: OutputHead,
    targets: Int[Tensor, " N"],
    temperature: float,
    chunk_size: int,
    return_entropy: bool,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    def of_chunk(rows: Tensor, ids: Tensor) -> Any:
        return _LogitsLogprob.apply(  # type: ignore[no-untyped-call]
            head(rows), ids, temperature, return_entropy
        )

    parts = []
    for rows, ids in _chunks(hidden, targets, size=chunk_size):
        # the head may hold trained parameters of its own, so only the grad mode decides
        if torch.is_grad_enabled():
            parts.append(checkpoint(of_chunk, rows, ids, use_reentrant=False))
        else:
            parts.append(of_chunk(rows, ids))
    logprobs = torch.cat([part[0] for part in parts])
    return logprobs, torch.cat([part[1] for part in parts]) if return_entropy else None


class _LogitsLogprob(torch.autograd.Function):
    """Log-softmax at one index per row; saves the logits as they came and two numbers per row."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, return_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        result = _statistics(_scaled(logits, temperature), targets, return_entropy)
        ctx.temperature = temperature
        ctx.save_for_backward(logits, targets, result.normalizer, result.entropy)
        return result.logprobs, result.entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        logits, targets, normalizer, entropy = ctx.saved_tensors
        scaled = _scaled(logits, ctx.temperature)
        rows = _RowGradients(targets, normalizer, entropy, grad_logprobs, grad_entropy)
        gradient = _logits_gradient(scaled, rows).div_(ctx.temperature)
        return gradient.to(logits.dtype), None, None, None


class _LinearLogprob(torch.autograd.Function):
    """The same from hidden states and a weight; saves no logits, and two numbers per row.

    Against checkpointed chunks it sums the gradient of the weight in float32, skips that of a
    frozen weight, and chooses the precision of the products itself.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        return_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = _product_dtype(hidden, weight)
        columns = weight.to(dtype).T
        parts = [
            _statistics(_product(rows, columns, temperature), ids, return_entropy)
            for rows, ids in _chunks(hidden, targets, size=chunk_size)
        ]
        logprobs = torch.cat([part.logprobs for part in parts])
        normalizer = torch.cat([part.normalizer for part in parts])
        entropies = [part.entropy for part in parts if part.entropy is not None]
        entropy = torch.cat(entropies) if return_entropy else None
        ctx.options = dtype, temperature, chunk_size
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        dtype, temperature, chunk_size = ctx.options
        matrix = weight.to(dtype)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            # chunks are summed in at least float32: bfloat16 would swallow the later ones
            wide = torch.promote_types(dtype, torch.float32)
            grad_weight = torch.zeros_like(weight, dtype=wide)
        rows = _RowGradients(targets, normalizer, entropy, grad_logprobs, grad_entropy)
        for start in range(0, len(hidden), chunk_size):
            part = slice(start, start + chunk_size)
            states = hidden[part].to(dtype)
            scaled = _product(states, matrix.T, temperature)
            gradient = _logits_gradient(scaled, rows.select(part)).div_(temperature).to(dtype)
            if grad_hidden is not None:
                grad_hidden[part] = gradient @ matrix
            if grad_weight is not None:
                _add_product(grad_weight, gradient.T, states)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


class _Statistics(NamedTuple):
    logprobs: Float[Tensor, " C"]
    normalizer: Float[Tensor, " C"]
    entropy: Float[Tensor, " C"] | None


def _statistics(
    scaled: Float[Tensor, "C V"], targets: Int[Tensor, " C"], return_entropy: bool
) -> _Statistics:
    """Overwrites ``scaled``: at this size a copy costs as much as the arithmetic."""
    chosen = scaled.gather(1, targets[:, None])[:, 0]
    largest = scaled.amax(dim=1)
    scaled.sub_(largest[:, None])
    if not return_entropy:
        normalizer = scaled.exp_().sum(dim=1).log() + largest
        return _Statistics(chosen - normalizer, normalizer, None)
    weights = scaled.exp()
    sums = weights.sum(dim=1)
    # H = log Σ e^s - Σ e^s s / Σ e^s      with s = z - max
    entropy = sums.log() - weights.mul_(scaled.clamp_(min=_FAR)).sum(dim=1) / sums
    normalizer = sums.log() + largest
    return _Statistics(chosen - normalizer, normalizer, entropy)


class _RowGradients(NamedTuple):
    targets: Int[Tensor, " N"]
    normalizer: Float[Tensor, " N"]
    entropy: Float[Tensor, " N"] | None
    grad_logprobs: Float[Tensor, " N"]
    grad_entropy: Float[Tensor, " N"] | None

    def select(self, rows: slice) -> _RowGradients:
        return _RowGradients(
            self.targets[rows],
            self.normalizer[rows],
            self.entropy if self.entropy is None else self.entropy[rows],
            self.grad_logprobs[rows],
            self.grad_entropy if self.grad_entropy is None else self.grad_entropy[rows],
        )


def _logits_gradient(scaled: Float[Tensor, "C V"], rows: _RowGradients) -> Float[Tensor, "C V"]:
    """Gradient for the scaled logits; overwrites them.

    d logprob / dz_v = 1[v = target] - p_v          d entropy / dz_v = -p_v (log p_v + entropy)
    """
    log_p = scaled.sub_(rows.normalizer[:, None])
    weight = rows.grad_logprobs[:, None]
    if rows.entropy is None or rows.grad_entropy is None:
        gradient = log_p.exp_().mul_(-weight)
    else:
        p = log_p.exp()
        surprise = log_p.clamp_(min=_FAR).add_(rows.entropy[:, None])
        gradient = surprise.mul_(-rows.grad_entropy[:, None]).sub_(weight).mul_(p)
    return gradient.scatter_add_(1, rows.targets[:, None], weight)


def _scaled(logits: Float[Tensor, "C V"], temperature: float) -> Float[Tensor, "C V"]:
    """Copy logits that are not ours into a buffer to compute in."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.detach().to(wide, copy=True).div_(temperature)


def _product(
    rows: Float[Tensor, "C H"], columns: Float[Tensor, "H V"], temperature: float
) -> Float[Tensor, "C V"]:
    # autocast is still on in the forward pass of an autograd.Function and would choose for us
    with torch.autocast(rows.device.type, enabled=False):
        logits = rows.to(columns.dtype) @ columns
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)


def _add_product(
    total: Float[Tensor, "V H"], left: Float[Tensor, "V C"], right: Float[Tensor, "C H"]
) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)  # no second [V, H] for the product
    else:
        total += left @ right


def _product_dtype(hidden: Float[Tensor, "N H"], weight: Float[Tensor, "V H"]) -> torch.dtype:
    """Precision of the products: autocast's, unless this processor has no such instructions."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    # On x86 up to AVX2 16-bit products are emulated: 6 to 80 times slower than float32 ones.
    emulated = device == "cpu" and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
    return torch.float32 if dtype.itemsize == 2 and emulated else dtype


def _chunks(
    hidden: Float[Tensor, "N H"], targets: Int[Tensor, " N"], *, size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(torch.split(hidden, size), torch.split(targets, size), strict=True)
