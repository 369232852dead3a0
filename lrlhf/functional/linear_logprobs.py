"""Log-probabilities under a linear output head, in blocks of rows and columns of the logits.

``torch.nn.functional.linear_cross_entropy`` (torch 2.13) takes any gradient per token too. With the
same memory it needed 2.8 to 3.3 times the CPU time for the same numbers (1,024 tokens of size 256
and 32,000 ids, 512 of 896 and 50,000; float32, one core), and it knows neither entropy nor ids that
are never said. ``benchmarks/logprob_memory.py`` compares the two on GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lrlhf.functional.online_softmax import (
    OnlineSoftmax,
    RowGradients,
    RowStatistics,
    Support,
    kernels_on,
    logits_gradient,
)

_BLOCK = {"cpu": 2**22}
"""Logits in a block. On CPUs what is computed on a block should find it in the cache."""
_LARGE_BLOCK = 2**26
"""On other devices, whose kernels take microseconds to start and want work for all cores."""
_BLOCK_ROWS = 2048
"""Square blocks add the least often to the gradients of hidden states and weight."""


@dataclass(frozen=True, kw_only=True)
class LinearHead:
    """An output head that is a matrix product: ``logits = multiplier · hidden · weightᵀ``."""

    weight: Float[Tensor, "V H"]
    multiplier: float = 1.0
    """Above 0; logits are multiplied by it."""
    ruled_out: tuple[int, ...] = ()
    """Ids whose logits are -inf."""


class _Plan(NamedTuple):
    """What both passes must agree on."""

    dtype: torch.dtype
    """Of the matrix products."""
    scale: float
    """Of the logits."""
    ruled_out: tuple[int, ...]
    chunk_size: int
    entropy: bool
    differentiable: bool
    support: Support | None
    """Of all rows."""
    held: torch.dtype
    """Of blocks of logits; kernels compute with 16-bit ones too."""

    @property
    def wide(self) -> torch.dtype:
        """Of everything else."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def later(self) -> float:
        """Factor that blocks still lack: engines too round 16-bit logits before they scale them."""
        return 1.0 if self.held == self.wide else self.scale


def linear_logprobs(
    hidden: Float[Tensor, "N H"],
    head: LinearHead,
    targets: Int[Tensor, " N"],
    *,
    temperature: float,
    chunk_size: int,
    return_entropy: bool,
    support: Support | None = None,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None, Bool[Tensor, " N"]]:
    """Compute what :func:`~lrlhf.functional.logprobs.token_statistics` describes."""
    dtype = _product_dtype(hidden, head.weight)
    plan = _Plan(
        dtype=dtype,
        scale=head.multiplier / temperature,
        ruled_out=head.ruled_out,
        chunk_size=chunk_size,
        entropy=return_entropy,
        differentiable=torch.is_grad_enabled(),
        support=support,
        held=dtype if kernels_on(hidden.device) else torch.promote_types(dtype, torch.float32),
    )
    return _LinearLogprob.apply(hidden, head.weight, targets, plan)  # type: ignore[no-any-return, no-untyped-call]


class _LinearLogprob(torch.autograd.Function):
    """Saves a few numbers per row and the logits of ``chunk_size`` rows.

    The backward pass computes the other rows' logits again. Where only the hidden states have a
    gradient it computes none: that of a row's log-probability does not depend on what comes after,
    so it is computed while the row's logits are there, and multiplied later.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        of_hidden, of_weight = (plan.differentiable and each for each in ctx.needs_input_grad[:2])
        ahead = of_hidden and not of_weight and not plan.entropy
        # autocast is still on here and would choose the precision for us
        with torch.autocast(hidden.device.type, enabled=False):
            if ahead:
                logprobs, is_top, direction = _with_direction(hidden, weight, targets, plan)
                ctx.mark_non_differentiable(is_top)
                ctx.save_for_backward(direction)
                return logprobs, None, is_top
            rows = min(plan.chunk_size, len(hidden)) if of_hidden or of_weight else 0
            cache = hidden.new_empty((rows, len(weight)), dtype=plan.held)
            result = _statistics(_Blocks(hidden, weight, plan), targets, cache)
        ctx.save_for_backward(hidden, weight, targets, result.normalizer, result.entropy, cache)
        ctx.mark_non_differentiable(result.is_top)
        return result.logprobs, result.entropy, result.is_top

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _of_is_top: None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        saved = ctx.saved_tensors
        if len(saved) == 1:
            (direction,) = saved
            assert grad_logprobs is not None  # the only output
            return (direction * grad_logprobs[:, None]).to(direction.dtype), None, None, None
        hidden, weight, targets, normalizer, entropy, cache = saved
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalizer)
        later = ctx.plan.later
        rows = RowGradients(targets, normalizer, entropy, grad_logprobs, grad_entropy, later)
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden, dtype=ctx.plan.wide) if of_hidden else None
        grad_weight = torch.zeros_like(weight) if of_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            _add_gradients(_Blocks(hidden, weight, ctx.plan), rows, cache, grad_hidden, grad_weight)
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None


class _Columns(NamedTuple):
    """Some of the ids."""

    span: slice
    matrix: Float[Tensor, "C H"]
    """Their rows of the weight, in the precision of the products."""


class _Blocks:
    """The logits in blocks that are computed one after the other into the same memory.

    Memory that is new costs a CPU more than the arithmetic on it.
    """

    def __init__(
        self, hidden: Float[Tensor, "N H"], weight: Float[Tensor, "V H"], plan: _Plan
    ) -> None:
        self.states, self.plan = hidden.to(plan.dtype), plan
        self._weight = weight
        self._height = max(1, min(len(hidden), _BLOCK_ROWS))
        size = _BLOCK.get(hidden.device.type, _LARGE_BLOCK)
        size = min(size, plan.chunk_size * len(weight))
        # a copy of the weight's rows in another precision is no larger than a block either
        width = max(1, size // max(self._height, hidden.shape[1]))
        # as many blocks as it takes, and all about equally wide; GPUs load aligned vectors
        unit = 1 if hidden.device.type == "cpu" else 64
        self._width = math.ceil(len(weight) / math.ceil(len(weight) / width) / unit) * unit
        self._memory = [
            hidden.new_empty(self._height * self._width, dtype=plan.held)
            for _ in range(2 if plan.entropy and not kernels_on(hidden.device) else 1)
        ]

    def columns(self) -> Iterator[_Columns]:
        """Iterate over the ids."""
        for span in _spans(0, len(self._weight), self._width):
            yield _Columns(span, self._weight[span].to(self.plan.dtype))

    def rows(self, cache: int) -> list[slice]:
        """Split the rows; none of the spans holds some of the first ``cache`` rows and others."""
        rows = len(self.states)
        return [*_spans(0, cache, self._height), *_spans(cache, rows, self._height)]

    def scratch(self, rows: slice, columns: _Columns) -> list[Tensor]:
        """Return the memory to compute in, shaped as a block; two for an entropy in PyTorch."""
        shape = rows.stop - rows.start, len(columns.matrix)
        return [each[: math.prod(shape)].view(shape) for each in self._memory]

    def compute(self, rows: slice, columns: _Columns, out: Float[Tensor, "R C"]) -> None:
        """Write the logits of a block."""
        if out.dtype == self.plan.dtype:
            alpha = self.plan.scale / self.plan.later
            out.addmm_(self.states[rows], columns.matrix.T, beta=0, alpha=alpha)
        else:
            out.copy_(self.states[rows] @ columns.matrix.T).mul_(self.plan.scale)
        self.fill_ruled_out(columns, out, -math.inf)
        if self.plan.support is not None:
            self.plan.support.select(rows).restrict(out, start=columns.span.start)

    def fill_ruled_out(self, columns: _Columns, values: Float[Tensor, "R C"], value: float) -> None:
        """Overwrite the columns of ids that are never said."""
        for column in self.plan.ruled_out:
            if columns.span.start <= column < columns.span.stop:
                values[:, column - columns.span.start] = value


def _statistics(
    blocks: _Blocks, targets: Int[Tensor, " N"], cache: Float[Tensor, "K V"]
) -> RowStatistics:
    """Compute the statistics, and write the logits of the first K rows to ``cache``."""
    plan = blocks.plan
    softmax = OnlineSoftmax(targets, plan.wide, entropy=plan.entropy, scale=plan.later)
    for columns in blocks.columns():
        for rows in blocks.rows(len(cache)):
            scratch = blocks.scratch(rows, columns)
            logits = cache[rows, columns.span] if rows.stop <= len(cache) else scratch[0]
            blocks.compute(rows, columns, logits)
            softmax.add(logits, scratch, rows=rows, start=columns.span.start)
    return softmax.result()


def _add_gradients(
    blocks: _Blocks,
    of_rows: RowGradients,
    cache: Float[Tensor, "K V"],
    grad_hidden: Float[Tensor, "N H"] | None,
    grad_weight: Float[Tensor, "V H"] | None,
) -> None:
    """Add up what is not None; ``grad_weight`` is 0 before."""
    of_rows = of_rows.scaled(blocks.plan.scale)
    for columns in blocks.columns():
        total = None
        if grad_weight is not None:
            # at least float32: in bfloat16 the later rows would be lost
            total = grad_weight[columns.span].to(blocks.plan.wide)
        for rows in blocks.rows(len(cache)):
            gradient = _block_gradient(blocks, rows, columns, of_rows, cache)
            if grad_hidden is not None:
                _add_product(grad_hidden[rows], gradient, columns.matrix)
            if total is not None:
                _add_product(total, gradient.T, blocks.states[rows])
        if grad_weight is not None and total is not None and total.dtype != grad_weight.dtype:
            grad_weight[columns.span] = total


def _block_gradient(
    blocks: _Blocks,
    rows: slice,
    columns: _Columns,
    of_rows: RowGradients,
    cache: Float[Tensor, "K V"],
) -> Float[Tensor, "R C"]:
    scratch = blocks.scratch(rows, columns)
    if rows.stop <= len(cache):
        logits = cache[rows, columns.span]
    else:
        logits = scratch[0]
        blocks.compute(rows, columns, logits)
    start = columns.span.start
    gradient = logits_gradient(logits, scratch, of_rows.select(rows), start=start)
    blocks.fill_ruled_out(columns, gradient, 0.0)
    return gradient.to(blocks.plan.dtype)


def _with_direction(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    targets: Int[Tensor, " N"],
    plan: _Plan,
) -> tuple[Float[Tensor, " N"], Bool[Tensor, " N"], Float[Tensor, "N H"]]:
    """Compute log-probabilities, whether each is the largest, and its gradient for the states."""
    rows = min(plan.chunk_size, len(hidden))
    logits = hidden.new_empty((rows, len(weight)), dtype=plan.held)
    logprobs = hidden.new_empty(len(hidden), dtype=plan.wide)
    is_top = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
    direction = torch.zeros_like(hidden, dtype=plan.wide)
    for part in _spans(0, len(hidden), plan.chunk_size):
        support = plan.support and plan.support.select(part)
        blocks = _Blocks(hidden[part], weight, plan._replace(support=support))
        cache = logits[: part.stop - part.start]
        result = _statistics(blocks, targets[part], cache)
        logprobs[part], is_top[part] = result.logprobs, result.is_top
        ones = torch.ones_like(result.logprobs)
        of_rows = RowGradients(targets[part], result.normalizer, None, ones, None, plan.later)
        _add_gradients(blocks, of_rows, cache, direction[part], None)
    return logprobs, is_top, direction.to(hidden.dtype)


def _add_product(
    total: Float[Tensor, "A B"], left: Float[Tensor, "A C"], right: Float[Tensor, "C B"]
) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
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


def _spans(start: int, stop: int, size: int) -> Iterator[slice]:
    for begin in range(start, stop, size):
        yield slice(begin, min(begin + size, stop))
