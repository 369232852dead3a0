"""Advantage estimators by name: from the scores of a rollout to an advantage per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lrlhf.functional.advantages import (
    discounted_returns,
    generalized_advantages,
    group_mean_advantages,
    group_normalized_advantages,
    leave_one_out_advantages,
)
from lrlhf.functional.kl import shape_rewards
from lrlhf.functional.losses import Aggregate
from lrlhf.functional.masking import masked_sum
from lrlhf.functional.names import import_function, unknown_name


class EstimatorInputs(NamedTuple):
    """What an estimator may look at; rows of one prompt are consecutive."""

    scores: Float[Tensor, " B"]
    """NaN is unscorable."""
    kl: Float[Tensor, "B T"]
    """k1 estimate against the reference; zeros where the reward holds no penalty."""
    response_mask: Bool[Tensor, "B T"]
    num_generations: int
    kl_coef: float
    baseline_mask: Bool[Tensor, " B"]
    """False: the row stays out of its siblings' baselines and gets no advantage itself."""
    values: Float[Tensor, "B T"] | None = None
    """The critic's, when the rollout was taken; None: there is no critic."""


class Estimator(NamedTuple):
    """An estimator, and what it wants from its caller."""

    function: Callable[..., Tensor]
    """``(inputs, **options) -> [B, T]``, 0 outside the response and on unscorable rows."""
    kl_in_reward: bool = True
    """Where the KL penalty goes unless the user says otherwise: into the reward or the loss."""
    normalize: Literal["none", "sequence", "token"] = "none"
    """What the caller whitens over the global batch unless told otherwise."""
    description: str = ""
    per_token: bool = False
    """Whether a KL penalty in the reward makes the tokens of one response differ."""
    groups: bool = False
    """Whether it compares the responses to one prompt, and so needs two or more of them."""
    uses_values: bool = False
    """Whether it needs a critic."""
    loss: str = "token_clip"
    """Policy loss of its paper, a name from `lrlhf.functional.losses.POLICY_LOSSES`: what is
    trained with unless the user says otherwise."""
    aggregate: Aggregate | None = "token_mean"
    """What its paper averages that loss over; None: as the loss has it."""


def gae(inputs: EstimatorInputs, *, gamma: float = 1.0, lam: float = 0.95) -> Float[Tensor, "B T"]:
    """Generalized advantages of every token under the critic's values.

    The reward is the score on the last token and a KL penalty on each.

    Args:
        inputs: Scores, KL and values of the rollout.
        gamma: Discount per response token.
        lam: 0 trusts the critic (one-step errors), 1 the outcome (Monte Carlo).

    Raises:
        ValueError: There are no values.

    Reference:
        Schulman et al. 2016, eq. 16, https://arxiv.org/abs/1506.02438
    """
    if inputs.values is None:
        raise ValueError("the estimator gae needs the values of a critic, and there is none")
    scores = _counted_scores(inputs)
    rewards = shape_rewards(
        scores, inputs.kl.detach(), inputs.response_mask, kl_coef=inputs.kl_coef
    )
    result = generalized_advantages(
        rewards, inputs.values.detach(), inputs.response_mask, gamma=gamma, lam=lam
    )
    return torch.where(scores.isnan()[:, None], 0.0, result.advantages)


def rloo(inputs: EstimatorInputs) -> Float[Tensor, "B T"]:
    """Leave-one-out over the penalised score of each response, as in TRL.

        R = score - kl_coef · Σ_t kl_t,      A_t = R - mean R of the siblings, for every token

    Reference:
        Ahmadian et al. 2024, §3.2, https://arxiv.org/abs/2402.14740
    """
    advantages = leave_one_out_advantages(
        _penalized_scores(inputs), num_generations=inputs.num_generations
    )
    return _broadcast(advantages, inputs)


def rloo_openrlhf(
    inputs: EstimatorInputs, *, advantage_clip: float = 10.0, gamma: float = 1.0
) -> Float[Tensor, "B T"]:
    """Leave-one-out over the raw scores, then a KL penalty per token, as in OpenRLHF.

    The advantage of the score is clipped and put on the last token, ``-kl_coef · kl_t`` is added
    to every token, and the sum from each token on is its advantage.

    Args:
        inputs: Scores and KL of the rollout.
        advantage_clip: Bound on the leave-one-out advantage, in score units.
        gamma: Discount per response token.

    Raises:
        ValueError: ``advantage_clip`` is not positive.
    """
    if advantage_clip <= 0:
        raise ValueError(f"advantage_clip is {advantage_clip}; it must be above 0")
    advantages = leave_one_out_advantages(
        _counted_scores(inputs), num_generations=inputs.num_generations
    )
    return _returns(advantages.clamp(-advantage_clip, advantage_clip), inputs, gamma)


def grpo(inputs: EstimatorInputs, *, eps: float = 1e-4) -> Float[Tensor, "B T"]:
    """Z-score within the group, the same for every token.

    Args:
        inputs: Scores of the rollout, and KL where it is to go into the reward.
        eps: Added to the standard deviation, in score units.

    Reference:
        Shao et al. 2024, §4.1.2, https://arxiv.org/abs/2402.03300
    """
    advantages = group_normalized_advantages(
        _penalized_scores(inputs), num_generations=inputs.num_generations, eps=eps
    )
    return _broadcast(advantages, inputs)


def dr_grpo(inputs: EstimatorInputs) -> Float[Tensor, "B T"]:
    """Score minus the group's mean, the same for every token.

    Reference:
        Liu et al. 2025, §3.1, https://arxiv.org/abs/2503.20783
    """
    advantages = group_mean_advantages(
        _penalized_scores(inputs), num_generations=inputs.num_generations
    )
    return _broadcast(advantages, inputs)


def reinforce(inputs: EstimatorInputs, *, gamma: float = 1.0) -> Float[Tensor, "B T"]:
    """Reward-to-go of the score on the last token and a KL penalty per token; no baseline.

    Args:
        inputs: Scores and KL of the rollout.
        gamma: Discount per response token.

    Reference:
        Williams 1992, https://doi.org/10.1007/BF00992696
    """
    return _returns(_counted_scores(inputs), inputs, gamma)


def reinforce_baseline(inputs: EstimatorInputs, *, gamma: float = 1.0) -> Float[Tensor, "B T"]:
    """Group mean as the baseline of the score, then as `reinforce`.

    Args:
        inputs: Scores and KL of the rollout.
        gamma: Discount per response token.

    Reference:
        Hu et al. 2025 (REINFORCE++-baseline), §3, https://arxiv.org/abs/2501.03262
    """
    advantages = group_mean_advantages(
        _counted_scores(inputs), num_generations=inputs.num_generations
    )
    return _returns(advantages, inputs, gamma)


def reinforce_plus_plus(inputs: EstimatorInputs, *, gamma: float = 1.0) -> Float[Tensor, "B T"]:
    """As `reinforce`; its baseline is the whitening over the global batch, done by the caller.

    Args:
        inputs: Scores and KL of the rollout.
        gamma: Discount per response token.

    Reference:
        Hu et al. 2025, §3, https://arxiv.org/abs/2501.03262
    """
    return reinforce(inputs, gamma=gamma)


def cpgd(
    inputs: EstimatorInputs,
    *,
    weighting: str = "std",
    max_weight: float = 3.0,
    eps: float = 1e-6,
) -> Float[Tensor, "B T"]:
    """Score minus the group's mean, times a weight of its group; the same for every token.

        equal         1
        std           1 / (std of the group + eps)
        clip_filter   min(rows / rows with an advantage, max_weight), equal for all groups: what
                      filtering out the groups without a difference would do to a mean

    Args:
        inputs: Scores of the rollout, and KL where it is to go into the reward.
        weighting: One of the above.
        max_weight: Bound of ``clip_filter``.
        eps: Added to the standard deviation (biased, as in the paper's code), in score units.

    Raises:
        ValueError: Unknown weighting, or a bound below 1.

    Reference:
        Liu et al. 2025 (CPGD), §4.3, https://arxiv.org/abs/2505.12504
    """
    if weighting not in CPGD_WEIGHTINGS:
        raise unknown_name("cpgd weighting", weighting, CPGD_WEIGHTINGS)
    if max_weight < 1:
        raise ValueError(f"max_weight is {max_weight}; it must be 1 or more")
    scores, size = _penalized_scores(inputs), inputs.num_generations
    if weighting == "std":
        # biased and unbiased deviations differ by a factor that depends on the group's size only
        counted = (~scores.isnan()).view(-1, size).sum(dim=1, keepdim=True)
        advantages = group_mean_advantages(scores, num_generations=size).view(-1, size)
        variance = advantages.square().sum(dim=1, keepdim=True) / counted.clamp(min=1)
        return _broadcast((advantages / (variance.sqrt() + eps)).flatten(), inputs)
    advantages = group_mean_advantages(scores, num_generations=size)
    if weighting == "clip_filter":
        different = (advantages != 0).sum().clamp(min=1)
        counted = (~scores.isnan()).sum()
        advantages = advantages * (counted / different).clamp(max=max_weight)
    return _broadcast(advantages, inputs)


CPGD_WEIGHTINGS = ("equal", "std", "clip_filter")


def _counted_scores(inputs: EstimatorInputs) -> Float[Tensor, " B"]:
    # a row outside the baselines is treated like an unscorable one
    return torch.where(inputs.baseline_mask, inputs.scores.detach(), torch.nan)


def _penalized_scores(inputs: EstimatorInputs) -> Float[Tensor, " B"]:
    total = masked_sum(inputs.kl.detach(), inputs.response_mask, dim=1)
    return _counted_scores(inputs) - inputs.kl_coef * total


def _broadcast(advantages: Float[Tensor, " B"], inputs: EstimatorInputs) -> Float[Tensor, "B T"]:
    return torch.where(inputs.response_mask, advantages[:, None], 0.0)


def _returns(
    scores: Float[Tensor, " B"], inputs: EstimatorInputs, gamma: float
) -> Float[Tensor, "B T"]:
    rewards = shape_rewards(
        scores, inputs.kl.detach(), inputs.response_mask, kl_coef=inputs.kl_coef
    )
    returns = discounted_returns(rewards, inputs.response_mask, gamma=gamma)
    # an unscorable row is left out as a whole, its KL penalty included
    counted = ~_counted_scores(inputs).isnan()
    return torch.where(counted[:, None], returns, 0.0)


def _named(function: Callable[..., Tensor], **wants: Any) -> Estimator:
    description = (function.__doc__ or "").strip().partition("\n")[0]
    return Estimator(function, description=description, **wants)


ESTIMATORS: dict[str, Estimator] = {
    "gae": _named(gae, normalize="token", per_token=True, uses_values=True),
    "rloo": _named(rloo, groups=True, loss="sequence_clip", aggregate=None),
    # the code of OpenRLHF, and of REINFORCE++, which its authors wrote: PPO's loss, over all tokens
    "rloo_openrlhf": _named(rloo_openrlhf, per_token=True, groups=True),
    "grpo": _named(grpo, kl_in_reward=False, groups=True, aggregate="sequence_mean"),
    "group_norm": _named(grpo, kl_in_reward=False, groups=True, aggregate="sequence_mean"),
    "dr_grpo": _named(dr_grpo, kl_in_reward=False, groups=True, loss="dr_grpo", aggregate=None),
    "reinforce": _named(reinforce, per_token=True, loss="reinforce", aggregate=None),
    "reinforce_baseline": _named(
        reinforce_baseline, normalize="token", per_token=True, groups=True
    ),
    "reinforce_plus_plus": _named(reinforce_plus_plus, normalize="token", per_token=True),
    "cpgd": _named(cpgd, kl_in_reward=False, groups=True, loss="cpgd", aggregate=None),
}


def resolve_estimator(name: str) -> Estimator:
    """Look up an estimator by name, or import one by its dotted path.

    Args:
        name: A key of `ESTIMATORS`, or the path of a function like those here. As nothing is known
            of it, its advantages are not whitened and go into PPO's loss per token, which takes
            them whether or not the tokens of a response differ, and the KL penalty goes into the
            loss, where it counts whether or not the function looks at ``inputs.kl``.

    Raises:
        ValueError: Unknown name, or a path that leads to no function.
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    return _named(import_function("estimator", name, ESTIMATORS), kl_in_reward=False)
