"""When an optimizer step is left out, and when the run gives up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_RANGES: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    ("max_skipped", "0 or more", lambda value: value >= 0),
    ("window", "1 or more, or null", lambda value: value >= 1),
    ("max_ratio", "above 1, or null", lambda value: value > 1),
    ("max_kl", "above 0, or null", lambda value: value > 0),
    ("max_length_factor", "above 1, or null", lambda value: value > 1),
    ("max_mismatch", "above 0, or null", lambda value: value > 0),
    ("dump", "0 or more", lambda value: value >= 0),
)


class TrainingDivergedError(ValueError):
    """Steps had to be left out again and again, and leaving them out did not help."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Which steps are skipped, when the run stops, and what is dumped.

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
            (`lrlhf replay`), each with a copy of the weights; 0: none.
        dirpath: Folder of the dumps; null: ``dumps`` in the folder of the run.

    Raises:
        ValueError: A value is out of its range.
    """

    max_skipped: int = 10
    window: int | None = 1000
    max_ratio: float | None = 1e4
    max_kl: float | None = None
    max_length_factor: float | None = None
    max_mismatch: float | None = None
    dump: int = 3
    dirpath: str | None = None

    def __post_init__(self) -> None:
        for name, range_, is_within in _RANGES:
            value = getattr(self, name)
            if value is not None and not is_within(value):
                raise ValueError(f"guard.{name} is {value}; it must be {range_}")

    @property
    def max_log_ratio(self) -> float:
        """`max_ratio` in nats; inf: no limit."""
        return math.inf if self.max_ratio is None else math.log(self.max_ratio)


def refuse_policy_limits(guard: Guard, module: str) -> None:
    """Raise `ValueError` for a limit that is about responses, in a module that draws none.

    Args:
        guard: The limits.
        module: Its name.
    """
    for name in ("max_kl", "max_length_factor", "max_mismatch"):
        if getattr(guard, name) is not None:
            raise ValueError(f"guard.{name} is about a policy's responses; {module} has none")
