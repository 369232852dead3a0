"""Advantages along a sequence and within a group, by hand and by slower definitions."""

import pytest
import torch
from torch import Tensor

from lrlhf.functional import (
    discounted_returns,
    generalized_advantages,
    group_mean_advantages,
    group_normalized_advantages,
    has_baseline,
    leave_one_out_advantages,
)

NAN = float("nan")
GROUP_FUNCTIONS = pytest.mark.parametrize(
    "estimate", [leave_one_out_advantages, group_mean_advantages, group_normalized_advantages]
)


def explicit_sum(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """``A_t = Σ_k (γλ)^k δ_{t+k}`` over one row without gaps."""
    deltas = rewards + gamma * torch.cat([values[1:], values.new_zeros(1)]) - values
    weights = (gamma * lam) ** torch.arange(len(deltas), dtype=torch.float64)
    return torch.stack(
        [(weights[: len(deltas) - t] * deltas[t:]).sum() for t in range(len(deltas))]
    )


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.9, 0.0), (0.0, 0.5)])
def test_gae_is_the_discounted_sum_of_td_errors_over_what_the_mask_counts(
    gamma: float, lam: float
) -> None:
    # as if the tool output in the middle of the response had not been there
    mask = torch.tensor([[False, True, True, False, False, True, True, False]])
    rewards, values = torch.randn(2, 1, 8, dtype=torch.float64)
    result = generalized_advantages(rewards, values, mask, gamma=gamma, lam=lam)
    expected = explicit_sum(rewards[mask], values[mask], gamma, lam)
    torch.testing.assert_close(result.advantages[mask], expected)
    torch.testing.assert_close(result.returns[mask], expected + values[mask])
    assert (result.advantages[~mask] == 0).all()
    assert (result.returns[~mask] == 0).all()


def test_padding_and_row_order_do_not_matter_to_gae() -> None:
    rewards, values = torch.randn(2, 3, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 1, 0, 1, 0]]).bool()
    whole = generalized_advantages(rewards, values, mask, gamma=0.9)
    order = torch.tensor([2, 0, 1])
    padded = generalized_advantages(
        *(torch.nn.functional.pad(x[order], (2, 3), value=7.0) for x in (rewards, values)),
        torch.nn.functional.pad(mask[order], (2, 3)),
        gamma=0.9,
    )
    assert torch.equal(padded.advantages[:, 2:-3], whole.advantages[order])
    assert torch.equal(padded.returns[:, 2:-3], whole.returns[order])


@pytest.mark.parametrize("options", [{"gamma": 1.1}, {"gamma": -0.1}, {"lam": 1.1}, {"lam": NAN}])
def test_an_impossible_discount_is_refused(options: dict[str, float]) -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=next(iter(options))):
        generalized_advantages(x, x, x.bool(), **options)


def test_returns_are_rewards_to_go() -> None:
    rewards = torch.tensor([[9.0, 1.0, 2.0, 9.0, 4.0]])
    mask = torch.tensor([[False, True, True, False, True]])
    assert discounted_returns(rewards, mask).tolist() == [[0, 7, 6, 0, 4]]
    # 1 + ½ (2 + ½ · 4), the gap costs no discount
    assert discounted_returns(rewards, mask, gamma=0.5).tolist() == [[0, 3, 4, 0, 4]]


def test_group_advantages_by_hand() -> None:
    scores = torch.tensor([1.0, 2.0, 6.0, 0.0, 0.0, 3.0])
    loo = leave_one_out_advantages(scores, num_generations=3)
    assert loo.tolist() == pytest.approx([-3, -1.5, 4.5, -1.5, -1.5, 3])
    mean = group_mean_advantages(scores, num_generations=3)
    assert mean.tolist() == pytest.approx([-2, -1, 3, -1, -1, 2])
    # variances 14/2 and 6/2
    z = group_normalized_advantages(scores, num_generations=3, eps=0.5)
    first, second = 7**0.5 + 0.5, 3**0.5 + 0.5
    expected = [-2 / first, -1 / first, 3 / first, -1 / second, -1 / second, 2 / second]
    assert z.tolist() == pytest.approx(expected)


@GROUP_FUNCTIONS
@pytest.mark.parametrize("score", [0.1, 0.0, 1e6])
def test_equal_rewards_teach_exactly_nothing(estimate, score: float) -> None:
    # whatever other prompts score: three times 0.9 in float32, averaged, is not 0.9
    scores = torch.tensor([score] * 6 + [score, score + 0.9, score])
    assert estimate(scores, num_generations=3)[:6].tolist() == [0] * 6


@GROUP_FUNCTIONS
def test_an_unscorable_row_is_as_if_it_were_not_there(estimate) -> None:
    scores = torch.tensor([1.0, NAN, 2.0, 6.0], requires_grad=True)
    with_it = estimate(scores, num_generations=4)
    without = estimate(torch.tensor([1.0, 2.0, 6.0]), num_generations=3)
    assert torch.equal(with_it[[0, 2, 3]], without)
    assert with_it[1] == 0
    assert not with_it.requires_grad


@GROUP_FUNCTIONS
def test_rows_without_a_scorable_sibling_get_zero(estimate) -> None:
    assert estimate(torch.tensor([5.0, 7.0]), num_generations=1).tolist() == [0, 0]
    scores = torch.tensor([NAN, 5.0, NAN, NAN])
    assert estimate(scores, num_generations=2).tolist() == [0, 0, 0, 0]


def test_rows_that_can_be_compared_are_told() -> None:
    scores = torch.tensor([1.0, 2.0, NAN, NAN, 5.0, NAN])
    assert has_baseline(scores, num_generations=3).tolist() == [True, True] + [False] * 4


@pytest.mark.parametrize(
    ("rows", "size", "message"),
    [
        (12, 5, "12 scores.*num_generations=5; pass 10 or 15 rows, or num_generations=4"),
        (3, 7, "3 scores.*num_generations=7; pass 7 rows, or num_generations=3"),
        (4, 0, "num_generations is 0"),
    ],
)
def test_incomplete_groups_are_refused(rows: int, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        leave_one_out_advantages(torch.zeros(rows), num_generations=size)
