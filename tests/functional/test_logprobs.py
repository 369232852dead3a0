"""Chunked log-probabilities against whole ones, their gradients, and what they hold in memory."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lrlhf.functional import LogprobsAndEntropy, linear_logprobs, token_logprobs, token_statistics

N, H, V = 13, 5, 23
Head = Callable[[Tensor], Any]


def as_weight(weight: Tensor) -> Tensor:
    return weight


def as_callable(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda hidden: hidden @ weight.T


BOTH_PATHS = pytest.mark.parametrize("head", [as_weight, as_callable])


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(N, H, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, H, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(V, (N,))


def whole(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> LogprobsAndEntropy:
    """Everything at once, with torch's own functions."""
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return LogprobsAndEntropy(distribution.log_prob(targets), distribution.entropy())


def test_two_tokens_by_hand() -> None:
    # logits 0 and log 3 at every position: probabilities ¼ and ¾
    weight = torch.tensor([[0.0], [math.log(3)]])
    result = token_logprobs(torch.ones(2, 1), weight, torch.tensor([0, 1]), return_entropy=True)
    assert result.logprobs.exp().tolist() == pytest.approx([0.25, 0.75])
    entropy = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    assert result.entropy.tolist() == pytest.approx([entropy, entropy])


@BOTH_PATHS
def test_a_token_that_ties_with_the_best_is_one_of_them(head: Head) -> None:
    weight = torch.tensor([[1.0], [1.0], [0.0]])
    found = token_statistics(torch.ones(3, 1), head(weight), torch.arange(3))
    assert found.is_top.tolist() == [True, True, False]


@BOTH_PATHS
def test_an_entropy_has_a_gradient_of_its_own(head: Head) -> None:
    hidden, weight, targets = inputs()
    result = token_logprobs(hidden, head(weight), targets, chunk_size=4, return_entropy=True)
    expected = whole(hidden @ weight.T, targets)
    gradients = [
        torch.autograd.grad(both.entropy.sum(), (hidden, weight)) for both in (result, expected)
    ]
    torch.testing.assert_close(*gradients)


@BOTH_PATHS
@pytest.mark.parametrize("chunk_size", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_do_not_depend_on_the_chunks(
    head: Head, chunk_size: int, temperature: float
) -> None:
    hidden, weight, targets = inputs()
    expected = whole(hidden @ weight.T, targets, temperature)
    result = token_logprobs(
        hidden,
        head(weight),
        targets,
        temperature=temperature,
        chunk_size=chunk_size,
        return_entropy=True,
    )
    torch.testing.assert_close(result.logprobs, expected.logprobs)
    torch.testing.assert_close(result.entropy, expected.entropy)
    upstream = torch.randn(2, N, dtype=torch.float64)
    gradients = [
        torch.autograd.grad(
            (both.logprobs * upstream[0] + both.entropy * upstream[1]).sum(), (hidden, weight)
        )
        for both in (result, expected)
    ]
    torch.testing.assert_close(*gradients)


def test_a_head_keeps_its_bias_cap_and_parameters() -> None:
    hidden, _, targets = inputs()
    linear = nn.Linear(H, V, dtype=torch.float64)

    def capped(states: Tensor) -> Tensor:
        return 3 * torch.tanh(linear(states) / 3)

    trained = (hidden, linear.weight, linear.bias)
    result = token_logprobs(hidden, capped, targets, chunk_size=2)
    expected = whole(capped(hidden), targets).logprobs
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(
        torch.autograd.grad(result.sum(), trained), torch.autograd.grad(expected.sum(), trained)
    )


def test_dropout_in_the_head_is_the_same_in_both_passes() -> None:
    hidden, weight, targets = inputs()
    seen = []

    def head(states: Tensor) -> Tensor:
        dropped = nn.functional.dropout(states, 0.5)
        seen.append(dropped.detach())
        return dropped @ weight.T

    token_logprobs(hidden, head, targets, chunk_size=N - 1).sum().backward()
    first, _, again = seen
    assert torch.equal(first, again)


def summed(result: Tensor | LogprobsAndEntropy) -> Tensor:
    parts = result if isinstance(result, LogprobsAndEntropy) else (result,)
    return sum(part.sum() for part in parts)


@BOTH_PATHS
@pytest.mark.parametrize("return_entropy", [False, True])
def test_no_tokens_give_no_logprobs_and_zero_gradients(head: Head, return_entropy: bool) -> None:
    hidden, weight, targets = inputs()
    result = token_logprobs(hidden[:0], head(weight), targets[:0], return_entropy=return_entropy)
    for values in result if return_entropy else (result,):
        assert values.shape == (0,)
    (gradient,) = torch.autograd.grad(summed(result), weight)
    assert (gradient == 0).all()


@BOTH_PATHS
@pytest.mark.parametrize(
    ("given", "computed"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_the_log_softmax_is_at_least_float32(
    head: Head, given: torch.dtype, computed: torch.dtype
) -> None:
    hidden, weight, targets = inputs(given)
    result = token_logprobs(hidden, head(weight), targets, chunk_size=3, return_entropy=True)
    assert result.logprobs.dtype == result.entropy.dtype == computed
    for gradient in torch.autograd.grad(summed(result), (hidden, weight)):
        assert gradient.dtype == given


@pytest.fixture(params=["AVX2", "AVX512"])
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A processor without fast 16-bit products, and one with them."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    return str(request.param)


def test_autocast_decides_the_products_only_where_they_are_fast(cpu: str) -> None:
    hidden, weight, targets = inputs(torch.float32)
    exact = whole(hidden @ weight.T, targets).logprobs
    rounded = whole((hidden.bfloat16() @ weight.bfloat16().T).float(), targets).logprobs
    assert not torch.allclose(exact, rounded)
    with torch.autocast("cpu", torch.bfloat16):
        result = token_logprobs(hidden, weight, targets, chunk_size=N)
        wide = token_logprobs(hidden.double(), weight.double(), targets)
    torch.testing.assert_close(result, exact if cpu == "AVX2" else rounded)
    torch.testing.assert_close(wide, whole(hidden.double() @ weight.double().T, targets).logprobs)


def test_the_weights_gradient_is_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(linear_logprobs, "_BLOCK_ROWS", 1)
    rows = 512
    hidden = torch.ones(rows, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    result = token_logprobs(hidden, weight, torch.zeros(rows, dtype=torch.long), chunk_size=1)
    (gradient,) = torch.autograd.grad(result.sum(), weight)
    # each row gives ½; in bfloat16, 128 + ½ is 128 again
    assert gradient.flatten().tolist() == [rows / 2, -rows / 2]


def test_the_logits_gradient_of_a_ruled_out_token_is_zero() -> None:
    logits = torch.randn(N, V, dtype=torch.float64)
    logits[:, 3] = -math.inf
    copy = logits.clone()
    logits.requires_grad_()
    targets = torch.full((N,), 4)
    result = token_logprobs(logits, lambda rows: rows, targets, chunk_size=3, return_entropy=True)
    assert torch.equal(logits, copy)  # the head's logits are not overwritten
    (gradient,) = torch.autograd.grad(summed(result), logits)
    assert gradient.isfinite().all()
    assert (gradient[:, 3] == 0).all()


@BOTH_PATHS
def test_huge_logits_stay_finite(head: Head) -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]])
    result = token_logprobs(hidden, head(weight), torch.tensor([0, 0]), return_entropy=True)
    assert result.logprobs.tolist() == [0, -2e4]
    assert result.entropy.tolist() == [0, 0]
    (gradient,) = torch.autograd.grad(summed(result), hidden)
    assert gradient.tolist() == [[0], [2]]


class LargestTensor(TorchDispatchMode):
    """Remembers the elements of the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *sizes])
        return out


@BOTH_PATHS
@pytest.mark.parametrize(("return_entropy", "autocast"), [(True, False), (False, True)])
def test_no_more_than_one_chunk_of_logits_ever_exists(
    head: Head, return_entropy: bool, autocast: bool
) -> None:
    hidden = torch.randn(64, 4, requires_grad=True)
    weight = torch.randn(50, 4, requires_grad=True)
    targets = torch.randint(50, (64,))
    with LargestTensor() as mode:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = token_logprobs(
                hidden, head(weight), targets, chunk_size=8, return_entropy=return_entropy
            )
        summed(result).backward()
    assert 4 * 50 < mode.largest <= 8 * 50


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"chunk_size": 0}, "chunk_size is 0"),
    ],
)
def test_impossible_arguments_are_refused(options: dict[str, Any], culprit: str) -> None:
    hidden, weight, targets = inputs()
    with pytest.raises(ValueError, match=culprit):
        token_logprobs(hidden, weight, targets, **options)
