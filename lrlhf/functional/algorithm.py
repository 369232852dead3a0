"""What a policy-gradient algorithm consists of, as a value; each one is a file in `algorithms`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lrlhf.functional.advantages import discounted_returns
from lrlhf.functional.kl import shape_rewards
from lrlhf.functional.masking import masked_mean, masked_sum, whiten
from lrlhf.functional.turns import step_ends

Aggregate: TypeAlias = Literal["sequence_mean", "sequence_sum", "token_mean", "constant"]
"""How a loss per token is averaged, see `lrlhf.functional.aggregate`."""
LogMetric: TypeAlias = Callable[[str, Tensor | float], None]
"""What an estimator or a loss with a keyword argument ``log_metric`` gets: a metric is the mean of
all finite values that are logged in an iteration, on all ranks."""
LOG_METRIC = "log_metric"
Whiten: TypeAlias = Callable[..., Tensor]
"""Whitens the masked values of a process or of all: ``whiten(values, mask, eps=…)``."""


def log_metric_of(function: Callable[..., Tensor], log_metric: LogMetric) -> dict[str, LogMetric]:
    """Return the keyword argument for metrics, where a function has it."""
    return {LOG_METRIC: log_metric} if LOG_METRIC in inspect.signature(function).parameters else {}


def logs_nothing(name: str, values: Tensor | float) -> None:
    """Drop a metric: outside of a run there is no log."""


def identity(value: Tensor) -> Tensor:
    """Return the value: the sum over one process."""
    return value


class EstimatorInputs(NamedTuple):
    """Inputs of an advantage estimator; rows of one prompt are consecutive."""

    scores: Float[Tensor, " B"]
    """NaN is unscorable."""
    kl: Float[Tensor, "B T"]
    """Estimate against the reference (``reference.kl_estimator``; k1 unless set); zeros where the
    reward holds no penalty."""
    response_mask: Bool[Tensor, "B T"]
    num_generations: int
    kl_coef: float
    baseline_mask: Bool[Tensor, " B"]
    """False: the row stays out of its siblings' baselines and gets no advantage itself."""
    values: Float[Tensor, "B T"] | None = None
    """The critic's, when the rollout was taken; None: there is no critic."""
    rows: Mapping[str, Float[Tensor, " B"]] = {}
    """Further columns per response by name: ``reward/<function>``, what each reward function gave,
    ``weight/<function>``, what that counts in the score (NaN: the function was not asked), and the
    scores of the algorithm's ``extra_samples``."""
    tokens: Mapping[str, Float[Tensor, "B T"]] = {}
    """Further columns per token by name, as far as an iteration has them: ``sampling_logprobs`` of
    the engine, ``old_logprobs`` of the policy and ``ref_logprobs`` of the reference."""
    sum_over_ranks: Callable[[Tensor], Tensor] = identity
    """Adds up a tensor over all processes, for what an estimator counts in the whole batch."""
    turn_rewards: Float[Tensor, "B T"] | None = None
    """The part of ``scores`` that was earned at single tokens, in their unit; None: nothing was, or
    all of a score is to be credited to the response as a whole."""
    observations: Int[Tensor, "B K"] | None = None
    """A number for what the policy read before each of its turns since the last, see
    `lrlhf.functional.turns.observation_numbers`; None: the estimator does not use them."""
    bootstrap_mask: Bool[Tensor, " B"] | None = None
    """Rows that were cut off, whose return goes on with the critic's value; None: each return ends
    with its row."""


class Estimator(NamedTuple):
    """An advantage estimator, and what it requires of the run."""

    function: Callable[..., Tensor]
    """``(inputs: EstimatorInputs, **options) -> [B, T]``, 0 outside the response and on unscorable
    rows."""
    normalize: Literal["none", "sequence", "token"] = "none"
    """What the caller whitens over the global batch unless told otherwise."""
    per_token: bool = False
    """Whether a KL penalty in the reward makes the tokens of one response differ."""
    groups: bool = False
    """Whether it compares the responses to one prompt, and so needs two or more of them."""
    uses_values: bool = False
    """Whether it needs a critic."""
    uses_turn_rewards: bool = False
    """Whether it reads ``inputs.turn_rewards``; else they only count as parts of the scores."""
    per_turn: bool = False
    """Whether it compares turns, so that those of one response have advantages of their own."""
    uses_observations: bool = False
    """Whether it reads ``inputs.observations``."""
    uses_rewards: bool = False
    """Whether it reads the values of single rewards in ``inputs.rows`` in place of the scores."""
    uses_kl: bool = True
    """Whether it subtracts ``inputs.kl``; else a KL penalty can only go into the loss."""
    options: Mapping[str, Any] = {}
    """Keyword arguments of the function."""

    def normalized(
        self, advantages: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], whiten: Whiten = whiten
    ) -> Float[Tensor, "B T"]:
        """Whiten advantages as ``normalize`` says: per token, per sequence, or not at all.

        Args:
            advantages: As the estimator returns them.
            mask: The tokens that count.
            whiten: `lrlhf.functional.whiten` of this process, which adds ``eps`` to the variance;
                `lrlhf.run.Collectives.whiten`, of all ranks, adds it to the deviation.
        """
        if self.normalize == "token":
            return whiten(advantages, mask, eps=1e-8) * mask
        if self.normalize == "sequence":
            per_row = masked_mean(advantages, mask, dim=1)
            rows = mask.any(dim=1)
            return advantages + (whiten(per_row, rows, eps=1e-4) - per_row)[:, None] * mask
        return advantages

    @property
    def of_values(self) -> Estimator:
        """What gives the critic its targets: the same, at ``value_lam`` where that option is set.

        Reference:
            Decoupled GAE: Yuan et al. 2025 (VC-PPO), https://arxiv.org/abs/2503.01491
        """
        lam = self.options.get("value_lam")
        if lam is None:
            return self
        options = {**self.options, "lam": lam}
        options.pop("length_alpha", None)
        return self._replace(options=options)

    def __call__(
        self, inputs: EstimatorInputs, log_metric: LogMetric = logs_nothing
    ) -> Float[Tensor, "B T"]:
        """Compute the advantages with the options in place."""
        return self.function(inputs, **self.options, **log_metric_of(self.function, log_metric))


class PolicyLoss(NamedTuple):
    """A policy loss, and how it is averaged."""

    name: str
    function: Callable[..., Tensor]
    """``(logprobs, old_logprobs, advantages, response_mask, **options)``."""
    level: Literal["token", "sequence"] = "token"
    """Whether it takes advantages and returns losses ``[B, T]`` or ``[B]``."""
    aggregate: Aggregate = "token_mean"
    """Mode of :func:`lrlhf.functional.policy.aggregate`. A loss per sequence is always
    averaged over the sequences; then it is the mode of terms per token, see `term_aggregate`."""
    options: Mapping[str, Any] = {}
    """Keyword arguments of the function."""
    clips_tokens: bool = False
    """Of a loss per sequence: whether its ratio is a mean of ratios that are clipped one by one."""
    choose: Callable[..., Tensor] | None = None
    """``(covariance [N], generator, **options) -> bool [N]``: which tokens of a batch the loss
    treats otherwise, by `token_covariance`; the loss has them as ``covariant``, `[B, T]`. Its
    options stand in ``options`` too. None: there are none."""

    def choose_tokens(self, covariance: Float[Tensor, " N"], *, seed: int) -> Bool[Tensor, " N"]:
        """Call ``choose`` with its options.

        Args:
            covariance: Of all tokens of a batch, on the CPU.
            seed: Of a choice by chance, the same on all ranks.
        """
        assert self.choose is not None
        names = self.options.keys() - self.function_options.keys()
        own = {name: self.options[name] for name in names}
        return self.choose(covariance, torch.Generator().manual_seed(seed), **own)

    @property
    def function_options(self) -> dict[str, Any]:
        """The options that are not those of ``choose``."""
        names = inspect.signature(self.choose).parameters if self.choose else ()
        return {name: value for name, value in self.options.items() if name not in names}

    @property
    def term_aggregate(self) -> Aggregate:
        """Mode for the terms per token beside it, KL and entropy.

        That of the loss itself, so that terms and loss keep their proportion at any length: the
        gradient of a ratio of whole responses is a sum over their tokens, and so is the term's.
        """
        averaged = self.clips_tokens or self.options.get("length_normalized")
        if self.level == "token" or averaged:
            return self.aggregate
        return "sequence_sum"

    @property
    def clip_range(self) -> tuple[float, float] | None:
        """How far below and above 1 a ratio still counts as it is; None: the loss clips nothing.

        It is read from the options of these names; clip fractions are measured by it.
        """
        if "clip_range" in self.options:
            return self.options["clip_range"], self.options["clip_range"]
        if "ratio_max" in self.options:
            return math.inf, self.options["ratio_max"] - 1
        if "clip_low" in self.options:
            return self.options["clip_low"], self.options["clip_high"]
        return None


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A policy-gradient algorithm: advantages, loss, KL penalty and additional samples.

    Args:
        name: What messages and logs call it.
        estimator: How scores become advantages.
        loss: What is minimised, and how it is averaged over tokens and responses.
        kl_in: Where the KL penalty goes: into the reward or the loss.
        kl_coef: Strength of the penalty where the user names none; 0: the algorithm has none.
        extra_samples: What is sampled besides the responses, once per prompt: options of the run's
            `Sampling` to replace, by name. It is scored by the same rewards and not trained on; its
            score is ``inputs.rows[name]`` in the estimator.
    """

    name: str
    estimator: Estimator
    loss: PolicyLoss
    kl_in: Literal["reward", "loss"] = "loss"
    kl_coef: float = 0.05
    extra_samples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def counted_scores(inputs: EstimatorInputs) -> Float[Tensor, " B"]:
    """Scores, NaN where a row is in no baseline: such a row is treated like an unscorable one."""
    return torch.where(inputs.baseline_mask, inputs.scores.detach(), torch.nan)


def penalized_scores(inputs: EstimatorInputs) -> Float[Tensor, " B"]:
    """Scores minus the KL penalty of the whole response: ``score - kl_coef · Σ_t kl_t``."""
    total = masked_sum(inputs.kl.detach(), inputs.response_mask, dim=1)
    return counted_scores(inputs) - inputs.kl_coef * total


def spread_over_tokens(
    advantages: Float[Tensor, " B"], inputs: EstimatorInputs
) -> Float[Tensor, "B T"]:
    """Give every token of a response the response's advantage."""
    return torch.where(inputs.response_mask, advantages[:, None], 0.0)


def token_rewards(scores: Float[Tensor, " B"], inputs: EstimatorInputs) -> Float[Tensor, "B T"]:
    """Reward of each token: its KL penalty, what its turn earned, the rest of the score at the end.

        r_t = -kl_coef · kl_t + turn_t + (score - Σ_s turn_s) · 1[t is the last response token]

    Args:
        scores: Of each row, what its turns earned included; NaN adds nothing.
        inputs: KL, mask, and rewards of turns.
    """
    return shape_rewards(
        scores,
        inputs.kl.detach(),
        inputs.response_mask,
        kl_coef=inputs.kl_coef,
        turn_rewards=inputs.turn_rewards,
    )


def returns_to_go(
    scores: Float[Tensor, " B"],
    inputs: EstimatorInputs,
    gamma: float,
    discount: str = "token",
) -> Float[Tensor, "B T"]:
    """Discounted sum of `token_rewards` from each token on.

    Args:
        scores: Of each row; NaN leaves the row out, its KL penalty included.
        inputs: KL, mask, and rewards of turns.
        gamma: Discount per step.
        discount: What a step is, see `step_ends`.
    """
    mask = inputs.response_mask
    returns = discounted_returns(
        token_rewards(scores, inputs), mask, gamma=gamma, step_ends=step_ends(mask, discount)
    )
    counted = ~counted_scores(inputs).isnan()
    return torch.where(counted[:, None], returns, 0.0)
