"""Policy losses by name, each with the aggregation and the defaults of its paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from torch import Tensor

from lrlhf.functional.names import import_function
from lrlhf.functional.policy import (
    cispo_policy_loss,
    clipped_policy_loss,
    cpgd_policy_loss,
    importance_weighted_policy_loss,
    sequence_clipped_policy_loss,
)


class PolicyLoss(NamedTuple):
    """A loss and how its terms become one number."""

    function: Callable[..., Tensor]
    """``(logprobs, old_logprobs, advantages, response_mask, **options)``: `[B, T]` or `[B]`."""
    level: Literal["token", "sequence"]
    """Whether the advantages it takes, and the terms it returns, are per token or sequence."""
    aggregate: Literal["sequence_mean", "token_mean", "constant"]
    defaults: Mapping[str, Any] = MappingProxyType({})
    """Keyword arguments of the function."""


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "sequence_clip": PolicyLoss(
        sequence_clipped_policy_loss,
        "sequence",
        "sequence_mean",
        {"clip_low": 0.2, "clip_high": 0.2},
    ),
    "token_clip": PolicyLoss(
        clipped_policy_loss, "token", "sequence_mean", {"clip_low": 0.2, "clip_high": 0.2}
    ),
    "gspo": PolicyLoss(
        sequence_clipped_policy_loss,
        "sequence",
        "sequence_mean",
        {"clip_low": 3e-4, "clip_high": 4e-4, "length_normalized": True},
    ),
    "cispo": PolicyLoss(cispo_policy_loss, "token", "token_mean", {"ratio_max": 5.0}),
    "dapo": PolicyLoss(
        clipped_policy_loss, "token", "token_mean", {"clip_low": 0.2, "clip_high": 0.28}
    ),
    "dr_grpo": PolicyLoss(
        clipped_policy_loss, "token", "constant", {"clip_low": 0.2, "clip_high": 0.2}
    ),
    "cpgd": PolicyLoss(cpgd_policy_loss, "token", "sequence_mean", {"clip_range": 0.2}),
    "reinforce": PolicyLoss(importance_weighted_policy_loss, "token", "token_mean"),
}


def resolve_policy_loss(name: str) -> PolicyLoss:
    """Find a loss by its name or the import path of its function.

    A function of your own returns one term per token, aggregated as ``token_mean``.

    Raises:
        ValueError: There is no such name or path.
    """
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    return PolicyLoss(import_function("policy loss", name, POLICY_LOSSES), "token", "token_mean")
