"""Log-probabilities of a linear head, computed in blocks: their values, gradients and cost."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lrlhf.functional import LinearHead, LogprobsAndEntropy, linear_logprobs, token_logprobs

from .test_logprobs import H, N, V, inputs, whole

Loss = Callable[[LogprobsAndEntropy], Tensor]


@pytest.fixture(
    params=[(6, 2), (40, 4), (2**22, 2048)], ids=["tiny", "small", "whole"], autouse=True
)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Most logits and rows in a block: from one column of 2 rows to everything at once."""
    logits, rows = request.param
    monkeypatch.setattr(linear_logprobs, "_BLOCK", {"cpu": logits})
    monkeypatch.setattr(linear_logprobs, "_BLOCK_ROWS", rows)
    return logits, rows


LOSSES: dict[str, Loss] = {
    "logprobs": lambda out: (out.logprobs * torch.arange(N)).sum(),
    "entropy": lambda out: (out.entropy * torch.arange(N)).sum(),
    "both": lambda out: (out.logprobs * torch.arange(N) - out.entropy).sum(),
}


@pytest.mark.parametrize("chunk_size", [5, 100])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("trained", ["both", "hidden", "weight"])
def test_neither_blocks_nor_kept_rows_change_values_and_gradients(
    chunk_size: int, loss: str, trained: str
) -> None:
    hidden, weight, targets = inputs()
    parts = {"both": (hidden, weight), "hidden": (hidden,), "weight": (weight,)}[trained]
    for each in (hidden, weight):
        each.requires_grad_(any(each is part for part in parts))
    expected = whole(hidden @ weight.T / 0.7, targets)
    result = token_logprobs(
        hidden, weight, targets, temperature=0.7, chunk_size=chunk_size, return_entropy=True
    )
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(
        gradients(LOSSES[loss](result), *parts), gradients(LOSSES[loss](expected), *parts)
    )


@pytest.mark.parametrize("chunk_size", [5, 100])
def test_a_gradient_that_is_computed_ahead_is_that_of_each_row(chunk_size: int) -> None:
    hidden, weight, targets = inputs()
    weight.requires_grad_(False)
    head = LinearHead(weight=weight, multiplier=3.0)
    found = token_logprobs(hidden, head, targets, temperature=0.7, chunk_size=chunk_size)
    expected = whole(hidden @ weight.T * 3 / 0.7, targets).logprobs
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        *(gradients((each * torch.arange(N)).sum(), hidden) for each in (found, expected))
    )


def gradients(loss: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, parts)


@pytest.mark.parametrize(("chunk_size", "frozen"), [(5, False), (100, False), (5, True)])
def test_a_multiplier_and_ids_that_are_ruled_out(chunk_size: int, frozen: bool) -> None:
    hidden, weight, targets = inputs()
    weight.requires_grad_(not frozen)
    silent = (*range(7), 11)  # the first of the tiny blocks holds nothing else
    said = [id_ for id_ in range(V) if id_ not in silent]
    head = LinearHead(weight=weight, multiplier=3.0, ruled_out=silent)
    # as if the others were not there
    positions = targets % len(said)
    expected = whole(hidden @ weight[said].T * 3 / 0.7, positions)
    result = token_logprobs(
        hidden,
        head,
        torch.tensor(said)[positions],
        temperature=0.7,
        chunk_size=chunk_size,
        return_entropy=True,
    )
    torch.testing.assert_close(result, expected)
    trained = (hidden,) if frozen else (hidden, weight)
    torch.testing.assert_close(
        gradients(LOSSES["logprobs"](result), *trained),
        gradients(LOSSES["logprobs"](expected), *trained),
    )
    # a token that cannot be said has no probability, and teaches nothing about itself
    nothing = token_logprobs(hidden, head, torch.full((N,), 11))
    assert (nothing == -math.inf).all()
    p = torch.softmax(hidden @ weight[said].T * 3, dim=1).detach()
    first, *others = gradients(nothing.sum(), *trained)
    torch.testing.assert_close(first, -3 * p @ weight[said].detach())
    assert all((gradient[11] == 0).all() for gradient in others)


@pytest.mark.parametrize("sign", [1, -1])
def test_logits_that_grow_or_shrink_from_block_to_block_stay_exact(sign: int) -> None:
    weight = torch.linspace(-1e4, 1e4, V, dtype=torch.float64)[:, None] * sign
    hidden = torch.tensor([[1.0], [1e-3], [-1.0]], dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 11, V - 1])
    result = token_logprobs(hidden, weight, targets, return_entropy=True)
    expected = whole(hidden @ weight.T, targets)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(
        *(
            gradients(both.logprobs.sum() + both.entropy.sum(), hidden)
            for both in (result, expected)
        )
    )


class Products(TorchDispatchMode):
    """Counts multiplications of matrix products, in units of one over all logits."""

    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.addmm_, torch.ops.aten.mm):
            left, right = args[-2:]
            self.total += left.shape[0] * left.shape[1] * right.shape[1] / (N * H * V)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("frozen", "chunk_size", "entropy", "expected"),
    [
        (False, N, False, 3),
        (False, 100, True, 3),
        (False, 5, False, 4 - 5 / N),
        (True, 5, False, 2),
        (True, 100, False, 2),
        (True, 5, True, 3 - 5 / N),
    ],
)
def test_only_rows_that_are_not_kept_are_computed_again(
    frozen: bool, chunk_size: int, entropy: bool, expected: float
) -> None:
    hidden, weight, targets = inputs()
    weight.requires_grad_(not frozen)
    with Products() as products:
        result = token_logprobs(
            hidden, weight, targets, chunk_size=chunk_size, return_entropy=entropy
        )
        logprobs = result.logprobs if isinstance(result, LogprobsAndEntropy) else result
        logprobs.sum().backward()
    assert products.total == pytest.approx(expected)


@pytest.mark.parametrize("frozen", [False, True])
def test_without_grad_mode_one_product_is_computed(frozen: bool) -> None:
    hidden, weight, targets = inputs()
    weight.requires_grad_(not frozen)
    with Products() as products, torch.no_grad():
        token_logprobs(hidden, weight, targets, chunk_size=5)
    assert products.total == pytest.approx(1)
