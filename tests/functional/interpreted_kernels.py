"""What test_softmax_kernels.py runs in Triton's interpreter, as a plugin of pytest and as tests.

As a plugin it has the kernels compute on the CPU, in parts so small that rows take several.
"""

from collections.abc import Iterator

import pytest
import torch
import triton.language as tl
from torch import Tensor

from lrlhf.functional import LinearHead, linear_logprobs, online_softmax, token_statistics
from lrlhf.functional import softmax_kernels as kernels
from lrlhf.functional.online_softmax import Support

from .test_logprobs import BOTH_PATHS, Head, N, V, inputs


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr(online_softmax, "_KERNEL_DEVICES", {"cpu"})
    monkeypatch.setattr(kernels, "_COLUMNS", tl.constexpr(16))
    assert online_softmax.kernels_on(torch.device("cpu")) is kernels


@BOTH_PATHS
@pytest.mark.parametrize("name", ["add_statistics", "write_gradient"])
def test_both_passes_are_those_of_kernels(
    head: Head, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError(name)

    monkeypatch.setattr(kernels, name, refuse)
    hidden, weight, targets = inputs()
    with pytest.raises(RuntimeError, match=name):
        token_statistics(hidden, head(weight), targets).logprobs.sum().backward()


@pytest.mark.parametrize("width", [5, V])
@pytest.mark.parametrize("size", [0.1, 1e4])
@pytest.mark.parametrize(("trained", "entropy"), [("both", True), ("hidden", False)])
def test_values_and_gradients_are_those_without_kernels(
    width: int, size: float, trained: str, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_logprobs, "_BLOCK", {"cpu": N * width})
    hidden, weight, targets = inputs(torch.float32)
    hidden = (hidden.detach() * size).requires_grad_()
    weight.requires_grad_(trained == "both")
    # row 0 may say 3 ids, the others all but the first block
    support = Support.of(torch.tensor([7, 8, 20]), torch.tensor([3] + [0] * (N - 1)))
    targets = targets.clamp(min=6).index_fill(0, torch.tensor([0]), 8)
    head = LinearHead(weight=weight, multiplier=3.0, ruled_out=tuple(range(6)))
    upstream = torch.randn(2, N) * (torch.arange(N) % 3 > 0)  # a third of the rows is masked

    def computed() -> Iterator[Tensor]:
        found = token_statistics(
            hidden, head, targets, temperature=0.7, return_entropy=entropy, support=support
        )
        loss = (found.logprobs * upstream[0]).sum()
        yield from (found.logprobs, found.is_top)
        if found.entropy is not None:
            loss = loss + (found.entropy * upstream[1]).sum()
            yield found.entropy
        yield from torch.autograd.grad(
            loss, [each for each in (hidden, weight) if each.requires_grad]
        )

    actual = list(computed())
    monkeypatch.setattr(online_softmax, "_KERNEL_DEVICES", set())
    for one, other in zip(actual, computed(), strict=True):
        largest = float(other.detach().double().abs().max())
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6 * largest)


@BOTH_PATHS
@pytest.mark.parametrize("chunk_size", [3, N])
def test_logits_in_bfloat16_are_scaled_in_float32(
    head: Head, chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    hidden, weight, targets = inputs(torch.bfloat16)
    logits = (hidden @ weight.T).float().detach() / 0.7
    found = token_statistics(
        hidden, head(weight), targets, temperature=0.7, chunk_size=chunk_size, return_entropy=True
    )
    expected = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(found.logprobs, expected.log_prob(targets), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.entropy, expected.entropy(), rtol=1e-6, atol=1e-6)
    of_logits = torch.nn.functional.one_hot(targets, V) - expected.probs
    gradient = (of_logits / 0.7).bfloat16() @ weight
    found_gradient, _ = torch.autograd.grad(found.logprobs.sum(), (hidden, weight))
    torch.testing.assert_close(found_gradient, gradient, rtol=2e-2, atol=2e-2)


def test_numbers_of_rows_and_logits_may_be_strided() -> None:
    states = torch.randn(V, N, dtype=torch.float64).T
    ids = torch.randint(V, (N, 2))[:, 0]
    found = token_statistics(states, lambda logits: logits, ids)
    torch.testing.assert_close(found.logprobs, states.log_softmax(1).gather(1, ids[:, None])[:, 0])
