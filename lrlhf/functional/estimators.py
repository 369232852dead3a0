"""Advantage estimators by name: from scores and KL to one advantage per response token.

An estimator is a function of `EstimatorInputs` and keyword options. To add one, write such a
function and name it in the config by its import path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lrlhf.functional.advantages import (
    discounted_returns,
    group_mean_advantages,
    group_normalized_advantages,
    leave_one_out_advantages,
)
from lrlhf.functional.kl import shape_rewards
from lrlhf.functional.masking import masked_sum
from lrlhf.functional.names import import_function


class EstimatorInputs(NamedTuple):
    """What an estimator may look at."""

    scores: Tensor
    """`[B]`, rows of one prompt consecutive; NaN could not be scored."""
    kl: Tensor
    """`[B, T]`, k1 estimate of the KL to the reference; 0 where the reward holds no penalty."""
    response_mask: Tensor
    """`[B, T]` bool."""
    num_generations: int
    kl_coef: float
    baseline_mask: Tensor
    """`[B]` bool; False: the row gets no advantage and stays out of its siblings' baseline."""

    @property
    def comparable_scores(self) -> Tensor:
        """`[B]`: NaN also where a row is kept out of the baseline."""
        return self.scores.masked_fill(~self.baseline_mask, float("nan"))


EstimatorFunction = Callable[..., Tensor]


class Estimator(NamedTuple):
    """An estimator and how the rest of the iteration treats it."""

    function: EstimatorFunction
    kl_in_reward: bool
    """Where the KL penalty goes unless the user says otherwise: into the reward, or the loss."""
    normalize: Literal["none", "sequence", "token"]
    """What is whitened over the global batch unless the user says otherwise."""
    per_token: bool
    """A KL penalty in the reward makes the tokens of one response differ."""
    groups: bool
    """It compares the responses to one prompt and needs two or more of them."""
    description: str


def rloo(inputs: EstimatorInputs) -> Tensor:
    """Score minus summed KL penalty, minus the mean of the same of the siblings (TRL's order)."""
    penalty = inputs.kl_coef * masked_sum(inputs.kl, inputs.response_mask, dim=1)
    advantages = leave_one_out_advantages(
        inputs.comparable_scores - penalty, num_generations=inputs.num_generations
    )
    return _broadcast(advantages, inputs)


def rloo_openrlhf(inputs: EstimatorInputs, *, advantage_clip: float = 10.0) -> Tensor:
    """Leave-one-out on raw scores, clipped; the KL penalty per token, as reward to go.

    Args:
        inputs: The rollout.
        advantage_clip: Largest size of the leave-one-out difference.
    """
    baselined = leave_one_out_advantages(
        inputs.comparable_scores, num_generations=inputs.num_generations
    ).clamp(-advantage_clip, advantage_clip)
    return _reward_to_go(baselined, inputs, gamma=1.0)


def grpo(inputs: EstimatorInputs, *, eps: float = 1e-4) -> Tensor:
    """Z-score of the score within its group.

    Args:
        inputs: The rollout.
        eps: Added to the group's standard deviation.
    """
    advantages = group_normalized_advantages(
        _penalized(inputs), num_generations=inputs.num_generations, eps=eps
    )
    return _broadcast(advantages, inputs)


def dr_grpo(inputs: EstimatorInputs) -> Tensor:
    """Score minus the mean of its group, not divided by the deviation."""
    advantages = group_mean_advantages(_penalized(inputs), num_generations=inputs.num_generations)
    return _broadcast(advantages, inputs)


def reinforce(inputs: EstimatorInputs, *, gamma: float = 1.0) -> Tensor:
    """Reward to go without a baseline: score on the last token, KL penalty on every token.

    Args:
        inputs: The rollout.
        gamma: Discount per token.
    """
    return _reward_to_go(inputs.comparable_scores, inputs, gamma=gamma)


def reinforce_baseline(inputs: EstimatorInputs, *, gamma: float = 1.0) -> Tensor:
    """As `reinforce`, on the score minus the mean of its group.

    Args:
        inputs: The rollout.
        gamma: Discount per token.
    """
    baselined = group_mean_advantages(
        inputs.comparable_scores, num_generations=inputs.num_generations
    )
    return _reward_to_go(baselined, inputs, gamma=gamma)


def _penalized(inputs: EstimatorInputs) -> Tensor:
    penalty = inputs.kl_coef * masked_sum(inputs.kl, inputs.response_mask, dim=1)
    return inputs.comparable_scores - penalty


def _broadcast(advantages: Tensor, inputs: EstimatorInputs) -> Tensor:
    return advantages[:, None] * inputs.response_mask


def _reward_to_go(scores: Tensor, inputs: EstimatorInputs, *, gamma: float) -> Tensor:
    rewards = shape_rewards(scores, inputs.kl, inputs.response_mask, kl_coef=inputs.kl_coef)
    returns = discounted_returns(rewards, inputs.response_mask, gamma=gamma)
    scorable = ~inputs.comparable_scores.isnan()
    return torch.where(scorable[:, None], returns, torch.zeros_like(returns))


ESTIMATORS: dict[str, Estimator] = {
    "rloo": Estimator(rloo, True, "none", False, True, "leave-one-out, as TRL orders it"),
    "rloo_openrlhf": Estimator(
        rloo_openrlhf, True, "none", True, True, "leave-one-out, as OpenRLHF orders it"
    ),
    "grpo": Estimator(grpo, False, "none", False, True, "z-score in the group"),
    "dr_grpo": Estimator(dr_grpo, False, "none", False, True, "group mean, no deviation"),
    "reinforce": Estimator(reinforce, True, "none", True, False, "reward to go, no baseline"),
    "reinforce_baseline": Estimator(
        reinforce_baseline, True, "token", True, True, "reward to go, group mean baseline"
    ),
    "reinforce_plus_plus": Estimator(
        reinforce, True, "token", True, False, "reward to go, whitened over the global batch"
    ),
}


def resolve_estimator(name: str) -> Estimator:
    """Find an estimator by its name or the import path of its function.

    A function of your own gets the KL penalty in ``inputs.kl`` and is not whitened unless
    ``advantage.normalize`` says so.

    Raises:
        ValueError: There is no such name or path.
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    function = import_function("advantage estimator", name, ESTIMATORS)
    return Estimator(function, True, "none", False, False, f"user function {name}")
