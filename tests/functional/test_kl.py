"""KL estimates by hand, and the same estimates averaged over a known distribution."""

import math

import pytest
import torch

from lrlhf.functional import adaptive_kl_coef, kl_estimate, shape_rewards

NAN = float("nan")


def test_estimates_by_hand() -> None:
    logprobs, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])  # d = 0.5, -1
    assert kl_estimate(logprobs, ref).tolist() == [0.5, -1]
    assert kl_estimate(logprobs, ref, estimator="k2").tolist() == [0.125, 0.5]
    k3 = kl_estimate(logprobs, ref, estimator="k3")
    assert k3.tolist() == pytest.approx([math.exp(-0.5) - 0.5, math.e - 2])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimates_average_to_the_divergence(estimator: str) -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    estimates = kl_estimate(policy.log(), reference.log(), estimator=estimator)
    exact = 0.5 * math.log(2.5) + 0.3 * math.log(1.5) + 0.2 * math.log(1 / 3)
    assert (policy * estimates).sum().item() == pytest.approx(exact)


@pytest.mark.parametrize(
    ("estimator", "slope"), [("k1", 1), ("k2", 0.5), ("k3", 1 - math.exp(-0.5))]
)
def test_the_gradient_reaches_the_policy_only(estimator: str, slope: float) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    ref = torch.tensor([-1.5], requires_grad=True)
    kl_estimate(logprobs, ref, estimator=estimator).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope)
    assert ref.grad is None


def test_a_wild_token_leaves_k3_finite() -> None:
    k3 = kl_estimate(torch.tensor([-200.0, -1.0]), torch.tensor([-1.0, -200.0]), estimator="k3")
    # e^20 - 1 - 199 with the exponent bounded, and e^-20 - 1 + 199
    assert k3.tolist() == pytest.approx([math.exp(20) - 200, 198])


def test_the_score_comes_on_the_last_response_token() -> None:
    mask = torch.tensor([[False, True, False, True, False], [False, True, True, True, True]])
    kl = torch.full((2, 5), 0.5)
    rewards = shape_rewards(torch.tensor([1.0, -2.0]), kl, mask, kl_coef=0.2)
    expected = torch.tensor([[0, -0.1, 0, 0.9, 0], [0, -0.1, -0.1, -0.1, -2.1]])
    torch.testing.assert_close(rewards, expected)
    # unscorable and empty rows get none
    mask = torch.tensor([[True, True], [False, False]])
    kl = torch.tensor([[0.5, 0.0], [NAN, NAN]])
    rewards = shape_rewards(torch.tensor([NAN, 3.0]), kl, mask, kl_coef=1.0)
    assert rewards.tolist() == [[-0.5, 0], [0, 0]]


@pytest.mark.parametrize(
    ("current", "factor"),
    # error (current/4 - 1) within ±0.2, times 50/100
    [(4.4, 1.05), (4.0, 1.0), (3.6, 0.95), (400.0, 1.1), (0.0, 0.9), (-3.0, 0.9)],
)
def test_the_coefficient_follows_the_divergence(current: float, factor: float) -> None:
    coef = adaptive_kl_coef(0.3, current, target=4.0, horizon=100, num_samples=50)
    assert type(coef) is float
    assert coef == pytest.approx(0.3 * factor)


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({"target": 0.0}, "target is 0.0"),
        ({"horizon": 0}, "horizon is 0"),
        ({"current": NAN}, "measured KL is nan"),
        ({"current": math.inf}, "measured KL is inf"),
    ],
)
def test_impossible_arguments_of_the_controller_are_refused(change: dict, culprit: str) -> None:  # type: ignore[type-arg]
    arguments = {"current": 1.0, "target": 1.0, "horizon": 10, "num_samples": 1} | change
    with pytest.raises(ValueError, match=culprit):
        adaptive_kl_coef(0.1, **arguments)
