"""Log-probabilities and entropies over some of the ids: every path against torch on the rest."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lrlhf.functional import LinearHead, linear_logprobs, token_statistics
from lrlhf.functional.online_softmax import Support

from .test_logprobs import BOTH_PATHS, H, Head, N, V, inputs


def sets(targets: Tensor) -> list[list[int]]:
    """Between one id and all of them, each with its target; the third is not restricted."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for row, target in enumerate(targets.tolist()):
        size = (0, 3, V, 0, 9, 1)[row % 6]
        others = torch.randperm(V, generator=generator)[:size].tolist()
        made.append([] if row % 6 == 2 else sorted({target, *others}))
    return made


def as_support(ids: list[list[int]]) -> Support:
    flat = [each for row in ids for each in row]
    return Support.of(
        torch.tensor(flat, dtype=torch.int32), torch.tensor([len(row) for row in ids])
    )


def expected_of(logits: Tensor, targets: Tensor, ids: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Row by row, with a distribution that has no other ids."""
    logprobs, entropies = [], []
    for row, target, own in zip(logits, targets.tolist(), ids, strict=True):
        left = own or list(range(V))
        distribution = torch.distributions.Categorical(logits=row[left])
        logprobs.append(distribution.log_prob(torch.tensor(left.index(target))))
        entropies.append(distribution.entropy())
    return torch.stack(logprobs), torch.stack(entropies)


def test_three_tokens_by_hand() -> None:
    # probabilities 1/6, 2/6 and 3/6; without the last one 1/3 and 2/3
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(3)]])
    found = token_statistics(
        torch.ones(2, 1),
        weight,
        torch.tensor([0, 1]),
        return_entropy=True,
        support=Support.of(torch.tensor([0, 1, 0, 1]), torch.tensor([2, 2])),
    )
    assert found.logprobs.exp().tolist() == pytest.approx([1 / 3, 2 / 3])
    assert found.entropy is not None
    entropy = math.log(3) / 3 + 2 / 3 * math.log(1.5)
    assert found.entropy.tolist() == pytest.approx([entropy, entropy])
    assert found.is_top.tolist() == [False, True]


@BOTH_PATHS
@pytest.mark.parametrize("chunk_size", [1, 3, 100])
@pytest.mark.parametrize("block", [(6, 2), (40, 4), (2**22, 2048)])
@pytest.mark.parametrize("trained", ["both", "hidden"])
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients_are_those_of_a_distribution_over_the_rest(
    head: Head,
    chunk_size: int,
    block: tuple[int, int],
    trained: str,
    entropy: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_logprobs, "_BLOCK", {"cpu": block[0]})
    monkeypatch.setattr(linear_logprobs, "_BLOCK_ROWS", block[1])
    hidden, weight, targets = inputs()
    weight.requires_grad_(trained == "both")
    parts = [each for each in (hidden, weight) if each.requires_grad]
    ids = sets(targets)
    expected = expected_of(hidden @ weight.T / 0.7, targets, ids)
    found = token_statistics(
        hidden,
        head(weight),
        targets,
        temperature=0.7,
        chunk_size=chunk_size,
        return_entropy=entropy,
        support=as_support(ids),
    )
    torch.testing.assert_close(found.logprobs, expected[0])
    scale = torch.arange(N)
    losses: list[Any] = [(found.logprobs * scale).sum(), (expected[0] * scale).sum()]
    if entropy:
        assert found.entropy is not None
        torch.testing.assert_close(found.entropy, expected[1])
        losses = [
            loss - (each * scale).sum()
            for loss, each in zip(losses, (found.entropy, expected[1]), strict=True)
        ]
    torch.testing.assert_close(*(torch.autograd.grad(loss, parts) for loss in losses))


def test_a_support_and_ids_that_a_head_rules_out() -> None:
    hidden, weight, targets = torch.randn(1, H), torch.randn(V, H), torch.tensor([4])
    support = Support.of(torch.tensor([2, 4, 9]), torch.tensor([3]))
    head = LinearHead(weight=weight, ruled_out=(9,))
    found = token_statistics(hidden, head, targets, support=support)
    logits = (hidden @ weight.T)[0, [2, 4]]
    torch.testing.assert_close(found.logprobs[0], logits.log_softmax(0)[1])
