"""From rewards to advantages."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class AdvantagesAndReturns(NamedTuple):
    """What the policy and the value function are trained on."""

    advantages: Tensor
    """`[B, T]`"""
    returns: Tensor
    """`[B, T]`"""


def generalized_advantages(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> AdvantagesAndReturns:
    """Generalized advantage estimation, not whitened.

        δ_t = r_t + γ V_{t+1} - V_t
        A_t = δ_t + γλ A_{t+1}            with V and A zero after the last response token

    Args:
        rewards: Per-token rewards, any KL penalty already subtracted.
        values: Value estimates of the state before each token.
        response_mask: Positions outside it are skipped over, not treated as terminal, so tool
            output between two turns does not cut the credit of the first.
        gamma: Discount per token.
        lam: Bias-variance trade-off: 0 is the TD error, 1 the Monte Carlo return minus the value.

    Returns:
        The advantages, and ``advantages + values`` as the regression target of the value function.

    Reference:
        Schulman et al. 2016, eq. 11-16, https://arxiv.org/abs/1506.02438
    """
    advantages = torch.zeros_like(rewards)
    next_value = torch.zeros_like(rewards[:, 0])
    next_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        counts = response_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(counts, advantage, torch.zeros_like(advantage))
        next_value = torch.where(counts, values[:, t], next_value)
        next_advantage = torch.where(counts, advantage, next_advantage)
    returns = torch.where(response_mask, advantages + values, torch.zeros_like(values))
    return AdvantagesAndReturns(advantages, returns)


def discounted_returns(
    rewards: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"], *, gamma: float = 1.0
) -> Float[Tensor, "B T"]:
    """Reward to go: ``G_t = r_t + γ G_{t+1}`` over the response tokens.

    Args:
        rewards: Per-token rewards.
        response_mask: Positions outside it are skipped over and get 0.
        gamma: Discount per response token.
    """
    returns = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        counts = response_mask[:, t]
        following = torch.where(counts, rewards[:, t] + gamma * following, following)
        returns[:, t] = torch.where(counts, following, torch.zeros_like(following))
    return returns


def leave_one_out_advantages(
    scores: Float[Tensor, " B"], *, num_generations: int
) -> Float[Tensor, " B"]:
    """Each score minus the mean of its siblings that could be scored.

    Args:
        scores: Rows of one prompt consecutive; NaN could not be scored.
        num_generations: Responses per prompt.

    Returns:
        The advantages; unscorable rows and rows without a scorable sibling get 0.

    Raises:
        ValueError: The rows are not whole groups.

    Reference:
        Ahmadian et al. 2024, eq. 8, https://arxiv.org/abs/2402.14740
    """
    groups, scorable = _groups(scores, num_generations)
    known = groups.nan_to_num(nan=0.0)
    siblings = scorable.sum(dim=1, keepdim=True) - 1
    baseline = (known.sum(dim=1, keepdim=True) - known) / siblings.clamp(min=1)
    return _only(groups - baseline, scorable & (siblings > 0))


def group_mean_advantages(
    scores: Float[Tensor, " B"], *, num_generations: int
) -> Float[Tensor, " B"]:
    """Each score minus the mean of its group.

    Args:
        scores: Rows of one prompt consecutive; NaN could not be scored.
        num_generations: Responses per prompt.

    Returns:
        The advantages; unscorable rows get 0.

    Raises:
        ValueError: The rows are not whole groups.

    Reference:
        Liu et al. 2025 (Dr. GRPO), section 3.2, https://arxiv.org/abs/2503.20783
    """
    groups, scorable = _groups(scores, num_generations)
    return _only(groups - _mean(groups, scorable), scorable)


def group_normalized_advantages(
    scores: Float[Tensor, " B"], *, num_generations: int, eps: float = 1e-4
) -> Float[Tensor, " B"]:
    """Z-score of each score within its group (Bessel-corrected deviation).

    Args:
        scores: Rows of one prompt consecutive; NaN could not be scored.
        num_generations: Responses per prompt.
        eps: Added to the deviation.

    Returns:
        The advantages; unscorable rows and rows without a scorable sibling get 0.

    Raises:
        ValueError: The rows are not whole groups.

    Reference:
        Shao et al. 2024 (GRPO), section 4.1.2, https://arxiv.org/abs/2402.03300
    """
    groups, scorable = _groups(scores, num_generations)
    centered = torch.where(scorable, groups - _mean(groups, scorable), torch.zeros_like(groups))
    freedom = (scorable.sum(dim=1, keepdim=True) - 1).clamp(min=1)
    deviation = (centered.square().sum(dim=1, keepdim=True) / freedom).sqrt()
    return _only(centered / (deviation + eps), scorable)


def _groups(scores: Tensor, num_generations: int) -> tuple[Tensor, Tensor]:
    if num_generations < 1:
        raise ValueError(f"num_generations is {num_generations}; it must be 1 or more")
    rows = len(scores)
    if rows % num_generations:
        raise ValueError(
            f"{rows} rows are no whole groups of num_generations = {num_generations}; the nearest "
            f"number of rows is {max(1, round(rows / num_generations)) * num_generations}"
        )
    groups = scores.view(-1, num_generations)
    return groups, ~groups.isnan()


def _mean(groups: Tensor, scorable: Tensor) -> Tensor:
    total = groups.nan_to_num(nan=0.0).sum(dim=1, keepdim=True)
    return total / scorable.sum(dim=1, keepdim=True).clamp(min=1)


def _only(advantages: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, advantages, torch.zeros_like(advantages)).flatten()
