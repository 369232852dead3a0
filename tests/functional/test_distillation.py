"""Distances to a teacher: against TRL, against enumeration, and what must not matter."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lrlhf.functional import (
    generalized_jsd,
    importance_weighted_policy_loss,
    teacher_advantages,
    token_statistics,
)
from lrlhf.functional.distillation import BatchDistribution, TopRows, compared_statistics, with_rest

TRL = json.loads((Path(__file__).parent / "golden" / "trl_distillation.json").read_text())
NAMES = [f"{case['beta']}-{case['temperature']}" for case in TRL["cases"]]
CASE = pytest.mark.parametrize("case", TRL["cases"], ids=NAMES)


def identity(states: Tensor) -> Tensor:
    """A head whose logits are the hidden states."""
    return states


@CASE
@pytest.mark.parametrize("chunk_size", [2, 100])
def test_divergence_and_gradient_equal_trl(case: dict[str, Any], chunk_size: int) -> None:
    mask = torch.tensor(case["mask"])
    student = torch.tensor(case["student"], requires_grad=True)
    rows = BatchDistribution(torch.tensor(case["teacher"])[mask], identity, case["temperature"])
    _, distance = compared_statistics(
        student[mask],
        identity,
        torch.zeros(int(mask.sum()), dtype=torch.long),
        rows,
        beta=case["beta"],
        temperature=case["temperature"],
        chunk_size=chunk_size,
    )
    loss = distance.divergence.mean()
    loss.backward()
    torch.testing.assert_close(loss.item(), case["loss"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(student.grad, torch.tensor(case["gradient"]), rtol=1e-5, atol=1e-6)


# ---- every response of at most three tokens over three ids, of which 0 ends it

PREFIXES = [(), *itertools.product((1, 2), repeat=1), *itertools.product((1, 2), repeat=2)]
RESPONSES = [
    (*prefix, token) for prefix in PREFIXES for token in range(3) if token == 0 or len(prefix) == 2
]


@pytest.fixture
def tables() -> tuple[Tensor, Tensor]:
    """Logits of policy and teacher behind each prefix."""
    generator = torch.Generator().manual_seed(3)
    policy, teacher = (
        torch.randn(len(PREFIXES), 3, dtype=torch.float64, generator=generator) for _ in range(2)
    )
    return policy.requires_grad_(), teacher


def places(response: tuple[int, ...]) -> list[int]:
    return [PREFIXES.index(response[:length]) for length in range(len(response))]


def of_response(table: Tensor, response: tuple[int, ...]) -> Tensor:
    logprobs = table.log_softmax(dim=1)
    return torch.stack([logprobs[p, t] for p, t in zip(places(response), response, strict=True)])


def kl_between_responses(policy: Tensor, teacher: Tensor) -> Tensor:
    """Σ_y π(y) (log π(y) - log T(y)), differentiated through the probabilities too."""
    total = policy.new_zeros(())
    for response in RESPONSES:
        own, theirs = of_response(policy, response).sum(), of_response(teacher, response).sum()
        total = total + own.exp() * (own - theirs)
    return total


def kl_behind_prefixes(policy: Tensor, teacher: Tensor) -> Tensor:
    """Σ over prefixes of their probability, held fixed, times the KL of what follows."""
    total = policy.new_zeros(())
    for place, prefix in enumerate(PREFIXES):
        reached = of_response(policy, prefix).sum().exp() if prefix else policy.new_ones(())
        own, theirs = policy[place].log_softmax(0), teacher[place].log_softmax(0)
        total = total + reached.detach() * (own.exp() * (own - theirs)).sum()
    return total


def padded(table: Tensor) -> tuple[Tensor, Tensor]:
    """`[B, 3]` log-probabilities of all responses, and their mask."""
    rows = [of_response(table, response) for response in RESPONSES]
    mask = torch.tensor([[t < len(row) for t in range(3)] for row in rows])
    return torch.stack([torch.cat([row, row.new_zeros(3 - len(row))]) for row in rows]), mask


def test_the_responses_are_all_there_are(tables: tuple[Tensor, Tensor]) -> None:
    logprobs, _ = padded(tables[0])
    assert logprobs.detach().sum(dim=1).exp().sum().item() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    ("discount", "exact"), [(1.0, kl_between_responses), (0.0, kl_behind_prefixes)]
)
def test_the_expected_policy_gradient_is_that_of_the_reverse_kl(
    tables: tuple[Tensor, Tensor], discount: float, exact: Any
) -> None:
    policy, teacher = tables
    logprobs, mask = padded(policy)
    advantages = teacher_advantages(logprobs, padded(teacher)[0], mask, coef=1.0, discount=discount)
    loss = importance_weighted_policy_loss(logprobs, logprobs.detach(), advantages, mask)
    probabilities = logprobs.detach().sum(dim=1).exp()
    (gradient,) = torch.autograd.grad((probabilities * loss.sum(dim=1)).sum(), policy)
    (expected,) = torch.autograd.grad(exact(policy, teacher), policy)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_the_expected_gradient_of_the_loss_is_that_of_the_reverse_kl(
    tables: tuple[Tensor, Tensor],
) -> None:
    policy, teacher = tables
    total = policy.new_zeros(())
    for response in RESPONSES:
        where = places(response)
        own, distance = compared_statistics(
            policy[where],
            identity,
            torch.tensor(response),
            BatchDistribution(teacher[where], identity, 1.0),
        )
        total = total + own.logprobs.detach().sum().exp() * distance.divergence.sum()
    (gradient,) = torch.autograd.grad(total, policy)
    exact = kl_behind_prefixes(policy, teacher)
    (expected,) = torch.autograd.grad(exact, policy)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
    # the chain rule of the KL: its value is that between whole responses
    torch.testing.assert_close(total, kl_between_responses(policy, teacher))


# ---- by hand


def test_the_advantage_of_a_token_is_its_own_distance_unless_later_ones_count() -> None:
    policy, teacher = torch.tensor([[0.0, -1.0, -2.0, 5.0]]), torch.tensor([[0.0, -3.0, -1.0, 9.0]])
    mask = torch.tensor([[False, True, True, False]])
    immediate = teacher_advantages(policy, teacher, mask, coef=2.0)
    assert immediate.tolist() == [[0.0, -4.0, 2.0, 0.0]]
    half = teacher_advantages(policy, teacher, mask, coef=2.0, discount=0.5)
    assert half.tolist() == [[0.0, -3.0, 2.0, 0.0]]


def test_equal_distributions_have_no_distance_and_no_gradient() -> None:
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    for beta in (0.0, 0.3, 1.0):
        logprobs = logits.log_softmax(1)
        distance = generalized_jsd(logprobs, logprobs.detach(), beta=beta)
        torch.testing.assert_close(distance, torch.zeros(4, dtype=torch.float64))
        (gradient,) = torch.autograd.grad(distance.sum(), logits)
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


def test_nothing_flows_into_the_teacher() -> None:
    policy, teacher = torch.randn(2, 3, 5, requires_grad=True).unbind()
    own, theirs = policy.log_softmax(1), teacher.log_softmax(1)
    for beta in (0.0, 0.3, 1.0):
        distance = generalized_jsd(own, theirs, beta=beta).sum()
        trained, given = torch.autograd.grad(
            distance, (policy, teacher), retain_graph=True, allow_unused=True
        )
        assert trained.any()
        assert given is None
    mask = torch.ones(3, 5, dtype=torch.bool)
    assert not teacher_advantages(own, theirs, mask, coef=1.0).requires_grad


def test_a_teacher_in_bfloat16_is_compared_in_float32() -> None:
    teacher = torch.randn(3, 50).bfloat16()
    found = BatchDistribution(teacher, identity, 1.0).logprobs(slice(None), 50)
    assert torch.equal(found, teacher.float().log_softmax(1))


def test_own_statistics_beside_a_teacher_by_hand() -> None:
    # probabilities ¼, 0 and ¾; then two that are equally probable
    logits = torch.tensor([[0.0, -math.inf, math.log(3)], [1.0, 1.0, 0.0]])
    own, _ = compared_statistics(
        logits,
        identity,
        torch.tensor([0, 1]),
        BatchDistribution(torch.zeros(2, 3), identity, 1.0),
        return_entropy=True,
    )
    assert own.entropy is not None
    expected = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    assert own.entropy[0].item() == pytest.approx(expected)
    assert own.is_top.tolist() == [False, True]


def test_the_divergence_of_two_coins_is_what_it_is_by_hand() -> None:
    own, theirs = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    reverse = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    forward = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert generalized_jsd(own, theirs, beta=1.0).item() == pytest.approx(reverse)
    assert generalized_jsd(own, theirs, beta=0.0).item() == pytest.approx(forward)
    with pytest.raises(ValueError, match=r"beta is 1\.5"):
        generalized_jsd(own, theirs, beta=1.5)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_a_token_that_is_ruled_out_is_no_nan(beta: float) -> None:
    logits = torch.tensor([[0.3, -math.inf, 1.0]], requires_grad=True)
    teacher = torch.tensor([[0.1, -math.inf, 0.2]]).log_softmax(1)
    distance = generalized_jsd(logits.log_softmax(1), teacher, beta=beta)
    distance.sum().backward()
    assert logits.grad is not None
    assert distance.isfinite().all()
    assert logits.grad.isfinite().all()
    kept = logits.detach()[:, [0, 2]].log_softmax(1)
    expected = generalized_jsd(kept, teacher[:, [0, 2]], beta=beta)
    torch.testing.assert_close(distance.detach(), expected)


# ---- top k, padding of the vocabulary, statistics


def of_top(policy: Tensor, teacher: Tensor, k: int, beta: float = 1.0) -> Tensor:
    top = teacher.log_softmax(1).topk(k, dim=1)
    rows = TopRows(top.indices, top.values, teacher.log_softmax(1)[:, 0])
    targets = torch.zeros(len(policy), dtype=torch.long)
    return compared_statistics(policy, identity, targets, rows, beta=beta)[1].divergence


def test_the_best_tokens_of_a_chunk_are_those_of_its_rows() -> None:
    policy, teacher = torch.randn(2, 5, 9, dtype=torch.float64).unbind()
    policy[0] = teacher[0]
    targets, best = torch.randint(9, (5,)), teacher.log_softmax(1).topk(3, dim=1)
    of_targets = teacher.log_softmax(1).gather(1, targets[:, None])[:, 0]
    rows = TopRows(best.indices, best.values, of_targets)
    # over the three and all others together
    own, theirs = (one.softmax(1).gather(1, best.indices) for one in (policy, teacher))
    own, theirs = (torch.cat([p, 1 - p.sum(1, keepdim=True)], dim=1) for p in (own, theirs))
    reverse, forward = ((p * (p / q).log()).sum(1) for p, q in ((own, theirs), (theirs, own)))
    agrees = policy.argmax(1) == teacher.argmax(1)
    for size in (2, 5):
        _, found = compared_statistics(policy, identity, targets, rows, beta=0.0, chunk_size=size)
        expected = (forward, reverse, agrees, of_targets)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_the_distance_over_the_best_tokens_grows_to_the_whole() -> None:
    policy, teacher = torch.randn(2, 5, 9, dtype=torch.float64).unbind()
    whole = generalized_jsd(policy.log_softmax(1), teacher.log_softmax(1), beta=1.0)
    before = torch.zeros(5, dtype=torch.float64)
    for k in range(1, 9):
        now = of_top(policy, teacher, k)
        assert (now >= before - 1e-12).all(), "merging ids never adds to a KL"
        before = now
    # of nine ids eight and the rest are all
    torch.testing.assert_close(before, whole)


def test_a_policy_that_is_far_too_sure_learns_what_it_lacks_elsewhere() -> None:
    # e^-30 for each of the 999 others: in float32 the probability of the first is 1
    student, teacher = torch.zeros(2, 1, 1000).unbind()
    student[0, 0], teacher[0, 0] = 30.0, 3.0
    student.requires_grad_()
    (gradient,) = torch.autograd.grad(of_top(student, teacher, k=8, beta=0.0).sum(), student)
    # of the forward KL it is π - T, over kept ids and the sum of the others
    theirs = [one / (math.exp(3) + 999) for one in (math.exp(3), 1.0)]
    assert gradient[0, 0].item() == pytest.approx(1 - theirs[0], abs=1e-5)
    assert gradient[0, 0].item() == pytest.approx(0.980, abs=5e-4)
    kept = teacher.topk(8, dim=1).indices[0, 1:]
    assert gradient[0, kept].tolist() == pytest.approx([-theirs[1]] * 7, abs=1e-6)
    others = gradient[0].sum() - gradient[0, 0] - gradient[0, kept].sum()
    assert others.item() == pytest.approx(-992 * theirs[1], abs=1e-4)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_where_the_best_are_all_there_are_nothing_is_left_to_compare(beta: float) -> None:
    policy, teacher = torch.randn(2, 5, 9).unbind()
    policy.requires_grad_()
    whole = generalized_jsd(policy.log_softmax(1), teacher.log_softmax(1), beta=beta)
    torch.testing.assert_close(of_top(policy, teacher, 9, beta), whole)
    # and where a head rules out all others
    ruled = torch.full((5, 3), -math.inf)
    more = [torch.cat([one, ruled], dim=1) for one in (policy, teacher)]
    found = of_top(*more, 9, beta)
    torch.testing.assert_close(found, whole, rtol=0, atol=2e-3)
    (gradient,) = torch.autograd.grad(found.sum(), policy, retain_graph=True)
    (expected,) = torch.autograd.grad(whole.sum(), policy)
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)


def test_the_rest_is_what_the_best_tokens_leave() -> None:
    kept = torch.tensor([[0.5, 0.2]], dtype=torch.float64).log()
    assert with_rest(kept).exp()[:, 2].tolist() == pytest.approx([0.3])


@pytest.mark.parametrize("wider", ["policy", "teacher"])
def test_rows_that_only_one_embedding_has_are_left_out(wider: str) -> None:
    policy, teacher = torch.randn(2, 3, 5).unbind()
    expected = generalized_jsd(policy.log_softmax(1), teacher.log_softmax(1), beta=1.0)
    more = torch.full((3, 2), 1.5)
    if wider == "policy":
        policy = torch.cat([policy, more], dim=1)
    else:
        teacher = torch.cat([teacher, more], dim=1)
    targets = torch.zeros(3, dtype=torch.long)
    _, distance = compared_statistics(
        policy, identity, targets, BatchDistribution(teacher, identity, 1.0)
    )
    torch.testing.assert_close(distance.divergence, expected)


@pytest.mark.parametrize("chunk_size", [3, 64])
def test_the_policys_own_statistics_are_those_without_a_teacher(chunk_size: int) -> None:
    hidden = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    head = torch.randn(11, 4, dtype=torch.float64)
    targets, teacher = torch.randint(11, (7,)), torch.randn(7, 11, dtype=torch.float64)
    options: dict[str, Any] = {"temperature": 0.6, "return_entropy": True}
    expected = token_statistics(hidden, head, targets, **options)
    found, distance = compared_statistics(
        hidden,
        lambda states: states @ head.T,
        targets,
        BatchDistribution(teacher, identity, 0.6),
        chunk_size=chunk_size,
        **options,
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    whole = (teacher / 0.6).log_softmax(1)
    torch.testing.assert_close(distance.logprobs, whole.gather(1, targets[:, None])[:, 0])
    agrees = (hidden @ head.T).argmax(1) == teacher.argmax(1)
    assert torch.equal(distance.agrees, agrees)
    wanted = [torch.autograd.grad(one.sum(), hidden, retain_graph=True)[0] for one in expected[:2]]
    for one, gradient in zip(found[:2], wanted, strict=True):
        torch.testing.assert_close(
            torch.autograd.grad(one.sum(), hidden, retain_graph=True)[0], gradient
        )
