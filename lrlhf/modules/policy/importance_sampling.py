"""Correcting an update for responses that were not drawn by quite the policy that is trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lrlhf.functional.importance import IMPORTANCE_MODES, importance_weights
from lrlhf.functional.masking import masked_sum
from lrlhf.functional.names import unknown_name
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.types import Experience, Rollout


@dataclass(frozen=True, kw_only=True)
class ImportanceSampling:
    """How the policy loss makes up for an engine whose probabilities are not the trainer's.

    Every token's gradient is multiplied by a weight made of the ratio of the two probabilities, in
    losses per token and per response alike. Those of KL, entropy and value terms are not, and no
    denominator changes.

    Args:
        mode: What becomes of the ratio: token_truncate (TIS), token_mask (IcePop),
            sequence_truncate, sequence_mask or sequence_mean_mask, see
            `lrlhf.functional.importance_weights`; none: no weights, whatever the engine.
        low: Smallest ratio that still counts, where the mode masks; None: 0.5 for token_mask, 0
            for sequence_mask, 0.95 for sequence_mean_mask.
        high: Largest ratio that counts as it is; None: 2 where the mode truncates, 5 for
            token_mask, 3 for sequence_mask, 1.05 for sequence_mean_mask.

    Raises:
        ValueError: A bound that the mode does not have, or one on the wrong side of 1.
    """

    mode: Literal[
        "none",
        "token_truncate",
        "token_mask",
        "sequence_truncate",
        "sequence_mask",
        "sequence_mean_mask",
    ]
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if self.mode != "none" and self.mode not in IMPORTANCE_MODES:
            raise unknown_name("importance_sampling.mode", self.mode, ("none", *IMPORTANCE_MODES))
        mode = IMPORTANCE_MODES.get(self.mode)
        for name, value in (("low", self.low), ("high", self.high)):
            if value is not None and (mode is None or (name == "low" and mode.truncates)):
                raise ValueError(
                    f"importance_sampling.{name} is {value}, but mode {self.mode!r} has no such "
                    "bound: leave it out, or choose a mode that has (token_mask, sequence_mask)"
                )
        if self.low is not None and not 0 <= self.low <= 1:
            raise ValueError(f"importance_sampling.low is {self.low}; it must lie in [0, 1]")
        if self.high is not None and not self.high >= 1:
            raise ValueError(f"importance_sampling.high is {self.high}; it must be 1 or more")

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest ratio, with the mode's own where none is set."""
        mode = IMPORTANCE_MODES[self.mode]
        return (
            mode.low if self.low is None else self.low,
            mode.high if self.high is None else self.high,
        )


AUTOMATIC = ImportanceSampling(mode="token_truncate")
"""Where none is set. The variance of a whole response's ratio grows with its length: at a mean
difference of 0.03 nats per token, weights by response leave a quarter of the batch at 4,096."""


def off_policy_rows(rollout: Rollout, *, exact: bool, step: int) -> Tensor:
    """`[B]`: the responses that another distribution than the policy's may have drawn.

    Args:
        rollout: Just drawn.
        exact: Whether the engine's log-probabilities are the policy's own.
        step: Training iterations behind the policy.
    """
    if not exact:
        return torch.ones_like(rollout.truncated)
    if rollout.weight_version is None:
        return torch.zeros_like(rollout.truncated)
    return rollout.weight_version < step


def weighted(
    experience: Experience, logprobs: Tensor, settings: ImportanceSampling, *, rows: Tensor
) -> Experience:
    """Give an experience its importance weights.

    Args:
        experience: Drawn by an engine.
        logprobs: `[B, T]` of the policy that the update starts from.
        settings: What becomes of the ratios.
        rows: `[B]`, the responses to weigh; the others count as they are.
    """
    if settings.mode == "none" or not rows.any():
        return experience
    low, high = settings.bounds
    weights = importance_weights(
        logprobs,
        experience.engine_logprobs,
        experience.response_mask,
        mode=settings.mode,
        low=low,
        high=high,
    )
    return replace(experience, importance_weights=torch.where(rows[:, None], weights, 1.0))


def measure_importance(
    micro: Experience, metrics: MetricSums, settings: ImportanceSampling
) -> None:
    """Mean weight, and the share that a bound has cut, of tokens or of whole responses."""
    weights = micro.importance_weights
    if weights is None:
        return
    mode, high = IMPORTANCE_MODES[settings.mode], settings.bounds[1]
    mask = micro.loss_mask
    if mode.level == "sequence":
        mask = mask & (mask.cumsum(dim=1) == 1)  # one token stands for its response
    cut = weights >= high if mode.truncates else weights == 0
    metrics.add("importance/weight_mean", masked_sum(weights, mask), mask.sum())
    metrics.add("importance/cut_fraction", (cut & mask).sum(), mask.sum())
