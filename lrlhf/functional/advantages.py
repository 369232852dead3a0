"""From rewards to advantages: along a sequence, and within the group of one prompt's responses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class AdvantagesAndReturns(NamedTuple):
    """Both are 0 outside the response."""

    advantages: Float[Tensor, "B T"]
    returns: Float[Tensor, "B T"]
    """Regression target of the value function."""


def generalized_advantages(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    gamma: float = 1.0,
    lam: float | Float[Tensor, " B"] = 0.95,
    step_ends: Bool[Tensor, "B T"] | None = None,
    final_values: Float[Tensor, " B"] | None = None,
) -> AdvantagesAndReturns:
    """Generalized advantage estimation, not whitened.

        δ_t = r_t + γ V_{t+1} - V_t
        A_t = δ_t + γλ A_{t+1}            with V and A zero after the last response token

    Args:
        rewards: Per-token rewards, any KL penalty already subtracted.
        values: Value estimates of the state before each token.
        response_mask: Positions outside it are skipped over, not treated as terminal, so tool
            output between two turns does not cut the credit of the first. What stands there is
            not read.
        gamma: Discount per step.
        lam: Bias-variance trade-off, of all rows or of each: 0 is the TD error, 1 the Monte Carlo
            return minus the value.
        step_ends: Tokens that end a step: ``gamma`` and ``lam`` act between them and what follows,
            and are 1 elsewhere. None: every response token is a step.
        final_values: V after the last response token, for rows that were cut off there; None: 0.

    Returns:
        The advantages, and ``advantages + values`` as the regression target of the value function.

    Raises:
        ValueError: ``gamma`` or ``lam`` outside [0, 1].

    Reference:
        Schulman et al. 2016, eq. 11-16, https://arxiv.org/abs/1506.02438; values after the last
        token: Pardo et al. 2018, §4, https://arxiv.org/abs/1712.00378
    """
    lams = torch.as_tensor(lam, dtype=torch.float64).view(-1, 1)
    for name, factor, within in (
        ("gamma", gamma, 0 <= gamma <= 1),
        ("lam", lam, bool(((lams >= 0) & (lams <= 1)).all())),
    ):
        if not within:
            raise ValueError(f"{name} is {factor}; it must lie in [0, 1]")
    ends = response_mask if step_ends is None else step_ends
    gammas = torch.ones_like(rewards).masked_fill(ends, gamma)
    decays = torch.where(ends, (gamma * lams).to(rewards), 1.0)
    columns = []
    next_advantage = torch.zeros_like(values[:, 0])
    next_value = next_advantage if final_values is None else final_values
    for t in reversed(range(rewards.shape[1])):
        counts = response_mask[:, t]
        delta = rewards[:, t] + gammas[:, t] * next_value - values[:, t]
        next_advantage = torch.where(counts, delta + decays[:, t] * next_advantage, next_advantage)
        next_value = torch.where(counts, values[:, t], next_value)
        columns.append(next_advantage)
    advantages = torch.stack(columns[::-1], dim=1)
    return AdvantagesAndReturns(
        torch.where(response_mask, advantages, 0.0),
        torch.where(response_mask, advantages + values, 0.0),
    )


def discounted_returns(
    rewards: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    gamma: float = 1.0,
    step_ends: Bool[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """Reward-to-go of every response token, ``G_t = r_t + γ G_{t+1}``; 0 outside the response.

    Args:
        rewards: Per-token rewards, any KL penalty already subtracted.
        response_mask: Positions outside it are skipped over and cost no discount.
        gamma: Discount per step.
        step_ends: Tokens that end a step; None: every response token is one.

    Raises:
        ValueError: ``gamma`` outside [0, 1].
    """
    # without a value function, GAE at lam = 1 is the Monte Carlo return
    no_values = torch.zeros_like(rewards)
    result = generalized_advantages(
        rewards, no_values, response_mask, gamma=gamma, lam=1.0, step_ends=step_ends
    )
    return result.advantages


def leave_one_out_advantages(
    scores: Float[Tensor, " B"], *, num_generations: int
) -> Float[Tensor, " B"]:
    """Leave-one-out baseline: score minus the mean score of the prompt's other responses.

        A_i = R_i - 1/(n - 1) Σ_{j ≠ i} R_j

    Args:
        scores: Rows of one prompt are consecutive; NaN is unscorable.
        num_generations: Rows per prompt.

    Returns:
        0 for a row that is unscorable or has no scorable sibling.

    Raises:
        ValueError: The rows do not form complete groups.

    Reference:
        Ahmadian et al. 2024, §3.2, https://arxiv.org/abs/2402.14740
    """
    groups = _groups(scores, num_generations)
    siblings = (groups.size - 1).clamp(min=1)
    others = groups.offsets.sum(dim=1, keepdim=True) - groups.offsets
    return _ungroup(groups.offsets - others / siblings, groups)


def group_mean_advantages(
    scores: Float[Tensor, " B"], *, num_generations: int
) -> Float[Tensor, " B"]:
    """Score minus the mean score of all scorable responses to the same prompt, itself included.

    Args:
        scores: Rows of one prompt are consecutive; NaN is unscorable.
        num_generations: Rows per prompt.

    Returns:
        0 for a row that is unscorable or has no scorable sibling.

    Raises:
        ValueError: The rows do not form complete groups.

    Reference:
        Liu et al. 2025 (Dr. GRPO), §3.1, https://arxiv.org/abs/2503.20783
    """
    groups = _groups(scores, num_generations)
    return _ungroup(_deviations(groups), groups)


def group_normalized_advantages(
    scores: Float[Tensor, " B"], *, num_generations: int, eps: float = 1e-4
) -> Float[Tensor, " B"]:
    """Z-score within the scorable responses to the same prompt.

        A_i = (R_i - mean) / (std + eps)          with Bessel's correction in std

    Args:
        scores: Rows of one prompt are consecutive; NaN is unscorable.
        num_generations: Rows per prompt.
        eps: Added to the standard deviation, in score units.

    Returns:
        0 for a row that is unscorable, has no scorable sibling, or whose siblings score the same.

    Raises:
        ValueError: The rows do not form complete groups.

    Reference:
        Shao et al. 2024 (GRPO), §4.1.2, https://arxiv.org/abs/2402.03300
    """
    groups = _groups(scores, num_generations)
    deviations = _deviations(groups)
    variance = deviations.square().sum(dim=1, keepdim=True) / (groups.size - 1).clamp(min=1)
    return _ungroup(deviations / (variance.sqrt() + eps), groups)


def has_baseline(scores: Float[Tensor, " B"], *, num_generations: int) -> Bool[Tensor, " B"]:
    """Return which rows can have an advantage: scorable, with a scorable sibling.

    Args:
        scores: Rows of one prompt are consecutive; NaN is unscorable.
        num_generations: Rows per prompt.

    Raises:
        ValueError: The rows do not form complete groups.
    """
    groups = _groups(scores, num_generations)
    return (groups.scorable & (groups.size > 1)).flatten()


class _Groups(NamedTuple):
    offsets: Float[Tensor, "P G"]
    """Scores, measured from the best of the group: equal scores are exactly 0, and so is their
    mean, whose rounding error a division by the deviation would otherwise blow up to about 1."""
    scorable: Bool[Tensor, "P G"]
    size: Int[Tensor, "P 1"]
    """Scorable rows of the group."""


def _groups(scores: Float[Tensor, " B"], num_generations: int) -> _Groups:
    _check_groups(scores.shape[0], num_generations)
    rows = scores.detach().view(-1, num_generations)
    scorable = ~rows.isnan()
    best = torch.where(scorable, rows, torch.finfo(rows.dtype).min).amax(dim=1, keepdim=True)
    offsets = torch.where(scorable, rows - best, 0.0)
    return _Groups(offsets, scorable, scorable.sum(dim=1, keepdim=True))


def _deviations(groups: _Groups) -> Float[Tensor, "P G"]:
    mean = groups.offsets.sum(dim=1, keepdim=True) / groups.size.clamp(min=1)
    return torch.where(groups.scorable, groups.offsets - mean, 0.0)


def _ungroup(advantages: Float[Tensor, "P G"], groups: _Groups) -> Float[Tensor, " B"]:
    counts = groups.scorable & (groups.size > 1)
    return torch.where(counts, advantages, 0.0).flatten()


def _check_groups(rows: int, num_generations: int) -> None:
    if num_generations < 1:
        raise ValueError(f"num_generations is {num_generations}; it must be 1 or more")
    if rows % num_generations:
        below = rows - rows % num_generations
        complete = " or ".join(str(size) for size in (below, below + num_generations) if size > 0)
        divisor = min(
            (size for size in range(1, rows + 1) if rows % size == 0),
            key=lambda size: abs(size - num_generations),
        )
        raise ValueError(
            f"{rows} scores do not form groups of num_generations={num_generations}; pass "
            f"{complete} rows, or num_generations={divisor}"
        )
