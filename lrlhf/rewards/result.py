"""What the rewards said of a batch of responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


class RewardError(ValueError):
    """The rewards cannot score what the policy writes; says which, how often, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """Scores of ``B`` responses by ``K`` reward functions."""

    scores: Tensor
    """`[B]` float32, the weighted sum; NaN where no function could score the response."""
    per_function: Tensor
    """`[B, K]` float32, before weights; NaN where the function gave None or failed."""
    names: tuple[str, ...]
    """Name of each function."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What functions passed to ``log_metric``, and how often each failed."""
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """Columns of ``B`` values that functions passed to ``log_extra``."""
    failures: tuple[str, ...] = ()
    """One text per function that raised or ran out of time, with its traceback."""
