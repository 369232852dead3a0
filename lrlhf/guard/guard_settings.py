"""When an optimizer step is left out, and when the run gives up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

DEFAULT_QUOTA = 10


class TrainingDivergedError(ValueError):
    """Steps had to be left out again and again, and leaving them out did not help."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """What counts as an anomaly, and what is kept of it.

    A loss, gradient, score, log-probability, advantage or value that is not finite always counts.
    The limits are further ones; null switches one off. Those that depend on the task (KL, length,
    mismatch) are off by default: no number is right for every run. That of the ratio is so far
    out that healthy training does not reach it.

    An anomaly that shows before the update (scores, log-probabilities, advantages, values, KL,
    length, mismatch) leaves out all optimizer steps of the iteration, and counts once. One that
    shows in an optimizer step (loss, gradient, ratio, and the mismatch where the step is the first
    to compute it) leaves out that step. All processes leave out the same.

    Args:
        max_skipped: Stop when more steps than this had to be left out within the last ``window``.
        window: Steps of ``trainer.global_step`` (of a policy: iterations) that ``max_skipped``
            looks back over, so that a long run may have its accidents; null: the whole run.
        max_ratio: Largest factor by which the probability of what the loss clips may have changed
            since the response was drawn, up or down: of a token, or under a loss of whole
            responses the geometric mean over the response's tokens, so that its length plays no
            part. Stored rollouts, which another policy drew, are not measured.
        max_kl: Largest mean KL(policy || reference) of an iteration's responses, in nats per
            response.
        max_length_factor: Largest mean response length of an iteration, in multiples of its
            running mean over the iterations before, once there are five.
        max_mismatch: Largest mean distance between the log-probabilities of trainer and engine, in
            nats per token.
        dump: Anomalies of a run that are written to disk with all that is needed to repeat them
            (`lrlhf replay`), each with a copy of weights and optimizer states; 0: none.
        dirpath: Folder of the dumps; null: ``dumps`` in the folder of the run.

    Raises:
        ValueError: A value is out of its range.
    """

    max_skipped: int = DEFAULT_QUOTA
    window: int | None = 1000
    max_ratio: float | None = 1e4
    max_kl: float | None = None
    max_length_factor: float | None = None
    max_mismatch: float | None = None
    dump: int = 3
    dirpath: str | None = None

    def __post_init__(self) -> None:
        for name, whole in (("max_skipped", self.max_skipped), ("dump", self.dump)):
            if whole < 0:
                raise ValueError(f"guard.{name} is {whole}; it must be 0 or more")
        if self.window is not None and self.window < 1:
            raise ValueError(f"guard.window is {self.window}; it must be 1 or more, or null")
        for name, factor in (
            ("max_ratio", self.max_ratio),
            ("max_length_factor", self.max_length_factor),
        ):
            if factor is not None and not factor > 1:
                raise ValueError(f"guard.{name} is {factor}; it must be above 1, or null")
        for name, distance in (("max_kl", self.max_kl), ("max_mismatch", self.max_mismatch)):
            if distance is not None and not distance > 0:
                raise ValueError(f"guard.{name} is {distance}; it must be above 0, or null")

    @property
    def max_log_ratio(self) -> float:
        """`max_ratio` in nats; inf: no limit."""
        return math.inf if self.max_ratio is None else math.log(self.max_ratio)


def as_guard(settings: Guard | Mapping[str, Any]) -> Guard:
    """Return settings as such, also those that a checkpoint holds as plain values."""
    return settings if isinstance(settings, Guard) else Guard(**settings)


def with_quota(guard: Guard, key: str, value: int | None) -> tuple[Guard, str]:
    """Take the quota from the option that it had before there was a guard, if that is set.

    Args:
        guard: The settings.
        key: Name of the older option.
        value: Its value; None: not set.

    Returns:
        The settings, and the name of the option that the quota comes from.

    Raises:
        ValueError: Both are set, to different numbers; or the value is out of its range.
    """
    if value is None:
        return guard, "guard.max_skipped"
    if value < 0:
        raise ValueError(f"{key} is {value}; it must be 0 or more")
    if guard.max_skipped not in (DEFAULT_QUOTA, value):
        raise ValueError(
            f"{key} is {value} and guard.max_skipped is {guard.max_skipped}, which mean the same: "
            f"drop {key}"
        )
    return replace(guard, max_skipped=value), key


def refuse_policy_limits(guard: Guard) -> None:
    """Refuse limits that are about responses, in a module that draws none.

    Raises:
        ValueError: One is set; names it.
    """
    given = {field.name: getattr(guard, field.name) for field in fields(guard)}
    for name in ("max_kl", "max_length_factor", "max_mismatch"):
        if given[name] is not None:
            raise ValueError(f"guard.{name} is about a policy's responses; RewardModel has none")
