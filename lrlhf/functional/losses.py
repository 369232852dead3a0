"""Policy losses by name: a function, how its values are averaged, and the paper's settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

from lrlhf.functional.names import import_function
from lrlhf.functional.policy import (
    cispo_policy_loss,
    clipped_policy_loss,
    cpgd_policy_loss,
    importance_weighted_policy_loss,
    sequence_clipped_policy_loss,
)

Aggregate: TypeAlias = Literal["sequence_mean", "token_mean", "constant"]
"""What a loss per token may be averaged over."""


class PolicyLoss(NamedTuple):
    """A loss, and what it wants from its caller."""

    function: Callable[..., Tensor]
    """``(logprobs, old_logprobs, advantages, response_mask, **options)``."""
    level: Literal["token", "sequence"]
    """Whether it takes advantages and returns losses ``[B, T]`` or ``[B]``."""
    aggregate: Aggregate
    """Mode of :func:`lrlhf.functional.policy.aggregate`; for sequences, their mean."""
    defaults: dict[str, Any]
    """Options of the function."""

    @property
    def term_aggregate(self) -> Aggregate | Literal["sequence_sum"]:
        """Mode for the terms per token beside it, KL and entropy.

        That of the loss itself, so that terms and loss keep their proportion at any length: the
        gradient of a ratio of whole responses is a sum over their tokens, and so is the term's.
        """
        if self.level == "token" or self.defaults.get("length_normalized"):
            return self.aggregate
        return "sequence_sum"

    @property
    def clip_range(self) -> tuple[float, float] | None:
        """How far below and above 1 a ratio still counts as it is; None: the loss clips nothing."""
        if "clip_range" in self.defaults:
            return self.defaults["clip_range"], self.defaults["clip_range"]
        if "ratio_max" in self.defaults:
            return math.inf, self.defaults["ratio_max"] - 1
        if "clip_low" in self.defaults:
            return self.defaults["clip_low"], self.defaults["clip_high"]
        return None


_PPO_CLIP = {"clip_low": 0.2, "clip_high": 0.2}

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "sequence_clip": PolicyLoss(
        sequence_clipped_policy_loss, "sequence", "sequence_mean", {**_PPO_CLIP}
    ),
    "token_clip": PolicyLoss(clipped_policy_loss, "token", "sequence_mean", {**_PPO_CLIP}),
    "gspo": PolicyLoss(
        sequence_clipped_policy_loss,
        "sequence",
        "sequence_mean",
        # §5.1 of https://arxiv.org/abs/2507.18071
        {"clip_low": 3e-4, "clip_high": 4e-4, "length_normalized": True},
    ),
    "cispo": PolicyLoss(cispo_policy_loss, "token", "token_mean", {"ratio_max": 5.0}),
    "dapo": PolicyLoss(
        clipped_policy_loss,
        "token",
        "token_mean",
        # §4.1 of https://arxiv.org/abs/2503.14476
        {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    ),
    "dr_grpo": PolicyLoss(clipped_policy_loss, "token", "constant", {**_PPO_CLIP}),
    "cpgd": PolicyLoss(
        cpgd_policy_loss, "token", "sequence_mean", {"clip_range": 0.2, "drift_coef": 0.0}
    ),
    "reinforce": PolicyLoss(importance_weighted_policy_loss, "token", "token_mean", {}),
}


def resolve_policy_loss(name: str) -> PolicyLoss:
    """Look up a policy loss by name, or import one by its dotted path.

    Args:
        name: A key of `POLICY_LOSSES`, or the path of a function like the losses per token, which
            is then averaged over tokens.

    Raises:
        ValueError: Unknown name, or a path that leads to no function.
    """
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    function = import_function("policy loss", name, POLICY_LOSSES)
    return PolicyLoss(function, "token", "token_mean", {})
