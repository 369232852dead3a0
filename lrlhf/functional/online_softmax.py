"""Softmax statistics of rows whose logits come in blocks of columns, and their gradient."""

from __future__ import annotations

import functools
import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

logger = logging.getLogger(__name__)

FAR = -1e4
"""Lowest log-probability in an entropy. Below it p is 0 in float64 too, and so is p log p, while
0 · -inf would make NaN of a token that the head rules out."""


_KERNEL_DEVICES = {"cuda"}


def kernels_on(device: torch.device) -> Any:
    """Return `softmax_kernels`, if Triton is there, which PyTorch for GPUs brings; else None."""
    return _tried(device) if device.type in _KERNEL_DEVICES else None


@functools.cache
def _tried(device: torch.device) -> Any:
    """Try both kernels on a row, as a machine may lack the C compiler that Triton needs."""
    if find_spec("triton") is None:
        return None
    kernels = import_module("lrlhf.functional.softmax_kernels")
    row = torch.zeros(1, 2, device=device)
    zero, targets = row[:, 0], torch.zeros(1, dtype=torch.long, device=device)
    state = [torch.zeros_like(zero) for _ in range(4)]
    try:
        kernels.add_statistics(row, targets, state, 0, 1.0)
        kernels.write_gradient(row, row, RowGradients(targets, zero, zero, zero, zero, 1.0), 0)
        total = float(state[2])
    except Exception as error:  # noqa: BLE001  of a compiler, a driver, a kernel: PyTorch needs none
        logger.warning("Triton's kernels do not run here, PyTorch's operations do: %s", error)
        return None
    if total != row.shape[1]:
        raise RuntimeError(f"Triton's kernels add up two ones to {total} on {device}")
    return kernels


class Support(NamedTuple):
    """Ids that the distribution of each row is renormalised over, as ragged rows (CSR)."""

    ids: Int[Tensor, " E"]
    sizes: Int[Tensor, " N"]
    """0: all ids."""
    offsets: Int[Tensor, " N1"]
    """Where those of each row begin, and the end; on the CPU."""

    @classmethod
    def of(cls, ids: Int[Tensor, " E"], sizes: Int[Tensor, " N"]) -> Support:
        """Return the support of rows that have ``sizes`` of the ``ids`` each."""
        return cls(ids, sizes, torch.nn.functional.pad(sizes.cpu().long().cumsum(0), (1, 0)))

    def select(self, rows: slice) -> Support:
        """Return that of some rows."""
        offsets = self.offsets[rows.start : rows.stop + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        return Support(self.ids[first:last], self.sizes[rows], offsets - first)

    def restrict(self, logits: Float[Tensor, "N C"], *, start: int = 0) -> None:
        """Set the logits of all other ids to -inf; ``start`` is the id of the first column."""
        width = logits.shape[1]
        # few of a long list are in a narrow block
        places = ((self.ids >= start) & (self.ids < start + width)).nonzero()[:, 0]
        rows = torch.searchsorted(self.sizes.cumsum(0), places, right=True)
        columns = self.ids[places] - start
        kept = logits[rows, columns]
        logits.masked_fill_((self.sizes > 0)[:, None], -torch.inf)
        logits[rows, columns] = kept


class RowStatistics(NamedTuple):
    """In nats."""

    logprobs: Float[Tensor, " N"]
    normalizer: Float[Tensor, " N"]
    """Log of the sum of the exponentials of the logits."""
    entropy: Float[Tensor, " N"] | None
    is_top: Bool[Tensor, " N"]
    """Whether no other id has a larger logit."""


class OnlineSoftmax:
    """Log-probability of one id per row, and the entropy, from blocks of logits in any order.

    The sums are kept relative to the largest logit so far and shrink when a larger one comes.

    Args:
        targets: Id whose log-probability is asked for, of each row.
        dtype: To compute in.
        entropy: Also follow the entropy.
        scale: Above 0; logits are multiplied by it.
    """

    def __init__(
        self, targets: Int[Tensor, " N"], dtype: torch.dtype, *, entropy: bool, scale: float
    ) -> None:
        self._scale = scale
        zeros = torch.zeros(targets.shape, dtype=dtype, device=targets.device)
        self._targets = targets
        self._chosen = zeros
        # finite, so that a block that is ruled out as a whole makes no inf - inf
        self._largest = torch.full_like(zeros, torch.finfo(dtype).min)
        self._sum = zeros.clone()
        self._moment = zeros.clone() if entropy else None

    def add(
        self, logits: Float[Tensor, "R C"], scratch: list[Tensor], *, rows: slice, start: int
    ) -> None:
        """Take in the logits of some rows for ids from ``start`` on.

        Args:
            logits: Stay as they are, unless they are ``scratch[0]``.
            scratch: Of the shape of the logits, overwritten; two where the entropy is followed.
                Kernels need none.
            rows: Rows that the logits belong to.
            start: Id of the first column.
        """
        if kernels := kernels_on(logits.device):
            kept = self._chosen, self._largest, self._sum, self._moment
            state = [None if each is None else each[rows] for each in kept]
            kernels.add_statistics(logits, self._targets[rows], state, start, self._scale)
            return
        if self._scale != 1.0:
            logits = scratch[0].copy_(logits).mul_(self._scale)
        index, inside = _within_block(self._targets[rows], start, logits.shape[1])
        chosen = logits.gather(1, index[:, None])[:, 0]
        self._chosen[rows] = torch.where(inside, chosen, self._chosen[rows])
        largest = torch.maximum(self._largest[rows], logits.amax(dim=1))
        drop = (self._largest[rows] - largest).clamp_(min=FAR)
        self._largest[rows] = largest
        below = torch.sub(logits, largest[:, None], out=scratch[0])
        if self._moment is None:
            sums = below.exp_().sum(dim=1)
        else:
            # Σ e^s s with s = z - max; a larger max by d makes of it e^-d (Σ e^s s - d Σ e^s)
            weights = torch.exp(below, out=scratch[1])
            sums = weights.sum(dim=1)
            moment = self._moment[rows] + drop * self._sum[rows]
            added = weights.mul_(below.clamp_(min=FAR)).sum(dim=1)
            self._moment[rows] = moment * drop.exp() + added
        self._sum[rows] = self._sum[rows] * drop.exp() + sums

    def result(self) -> RowStatistics:
        """Return the statistics over all columns that were added."""
        normalizer = self._sum.log() + self._largest
        # H = log Σ e^s - Σ e^s s / Σ e^s
        entropy = None if self._moment is None else self._sum.log() - self._moment / self._sum
        return RowStatistics(
            self._chosen - normalizer, normalizer, entropy, is_top=self._chosen >= self._largest
        )


class RowGradients(NamedTuple):
    """What the gradient for the logits of a row is made of."""

    targets: Int[Tensor, " N"]
    normalizer: Float[Tensor, " N"]
    entropy: Float[Tensor, " N"] | None
    grad_logprobs: Float[Tensor, " N"]
    grad_entropy: Float[Tensor, " N"] | None
    scale: float
    """Logits are multiplied by it."""

    def select(self, rows: slice) -> RowGradients:
        """Return those of some rows."""
        return RowGradients(*(each[rows] if isinstance(each, Tensor) else each for each in self))  # type: ignore[arg-type]

    def scaled(self, factor: float) -> RowGradients:
        """Return those for what is multiplied by ``factor`` to be the logits."""
        grad_entropy = None if self.grad_entropy is None else self.grad_entropy * factor
        return self._replace(grad_logprobs=self.grad_logprobs * factor, grad_entropy=grad_entropy)


def logits_gradient(
    logits: Float[Tensor, "R C"], scratch: list[Tensor], rows: RowGradients, *, start: int
) -> Float[Tensor, "R C"]:
    """Gradient for the logits of ids from ``start`` on, in ``scratch[0]``.

    d logprob / dz_v = 1[v = target] - p_v          d entropy / dz_v = -p_v (log p_v + entropy)

    Args:
        logits: Stay as they are, unless they are ``scratch[0]``.
        scratch: Of the shape of the logits, overwritten; two where the entropy has a gradient.
            Kernels need one, of any precision.
        rows: Of the rows of the logits.
        start: Id of the first column.
    """
    if kernels := kernels_on(logits.device):
        kernels.write_gradient(logits, scratch[0], rows, start)
        return scratch[0]
    if rows.scale != 1.0:
        logits = scratch[0].copy_(logits).mul_(rows.scale)
    log_p = torch.sub(logits, rows.normalizer[:, None], out=scratch[0])
    weight = rows.grad_logprobs[:, None]
    if rows.entropy is None or rows.grad_entropy is None:
        gradient = log_p.exp_().mul_(-weight)
    else:
        p = torch.exp(log_p, out=scratch[1])
        surprise = log_p.clamp_(min=FAR).add_(rows.entropy[:, None])
        gradient = surprise.mul_(-rows.grad_entropy[:, None]).sub_(weight).mul_(p)
    index, inside = _within_block(rows.targets, start, logits.shape[1])
    return gradient.scatter_add_(1, index[:, None], weight * inside[:, None])


def _within_block(
    targets: Int[Tensor, " R"], start: int, columns: int
) -> tuple[Int[Tensor, " R"], Tensor]:
    """Return a column that exists for each target, and whether it is the target's own."""
    local = targets - start
    return local.clamp(0, columns - 1), (local >= 0) & (local < columns)
