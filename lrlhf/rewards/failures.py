"""What goes wrong with reward functions, and when there is too much of it."""

from __future__ import annotations

import logging
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence

from jaxtyping import Float
from torch import Tensor

from lrlhf.rewards.function import RewardError
from lrlhf.rewards.reward_values import Score

logger = logging.getLogger(__name__)

MAX_UNSCORABLE_FRACTION = 0.1
"""Part of a batch that may lack a score where nobody has said how much."""
_MAX_LOGGED = 50
_FORGIVEN = 0.1
"""What a batch without failure takes off the count, so that a long run may have its accidents."""


class Failures:
    """Counts the failures of each function over a run, and logs every kind of them once.

    Args:
        most: See ``max_failures`` of `Rewards`.

    Raises:
        ValueError: It is below 1.
    """

    def __init__(self, most: int | None) -> None:
        if most is not None and most < 1:
            raise ValueError(f"max_failures is {most}; it must be 1 or more, or null")
        self._most = most
        self.counts: dict[str, float] = defaultdict(float)
        """Batches in which a function failed, less what was forgiven."""
        self._logged: set[str] = set()

    def afresh(self) -> Failures:
        """Return a count of its own, from 0."""
        return Failures(self._most)

    def count(self, name: str, part: float) -> None:
        """Note the part of a batch for which a function failed, from 0 to 1."""
        count = self.counts[name] + part - (1 - part) * _FORGIVEN
        self.counts[name] = max(0.0, round(count, 9))  # ten tenths are one

    def log(self, failure: str) -> None:
        """Log a failure that was not there before; it begins with the function's name."""
        name, _, text = failure.partition(": ")
        summary = f"{name}: {text.splitlines()[-1]}"  # which says what was raised
        if summary not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(summary)
            logger.error("reward function %s", failure)

    def warn(self, text: str) -> None:
        """Log what is no failure and should be known, once."""
        if text not in self._logged:
            self._logged.add(text)
            logger.warning("%s", text)

    def check(self, failures: Mapping[str, str]) -> None:
        """Look whether one of the functions that failed now has failed too often.

        Raises:
            RewardError: It has.
        """
        for name, failure in failures.items():
            if self._most is not None and self.counts[name] >= self._most:
                raise RewardError(
                    f"reward function {name!r} failed in {self._most} batches of this "
                    f"run, less one for every ten without failure. Repair it, or raise "
                    f"max_failures. The last failure: {failure}"
                )


def explain(error: BaseException) -> str:
    """Return what a function raised, with the traceback where the error does not say enough."""
    if type(error).__module__.startswith("lrlhf."):  # says itself what went wrong
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()


def check_quota(
    score: Score,
    per_function: Float[Tensor, "B K"],
    weights: Float[Tensor, "B K"],
    *,
    names: Sequence[str],
    failures: Sequence[str],
    allowed: float,
) -> None:
    """Look whether enough responses of a batch have a score, of those that a function applies to.

    Args:
        score: Of the responses.
        per_function: Values of the functions; NaN: none.
        weights: NaN: a function was not asked.
        names: Of the functions.
        failures: What went wrong.
        allowed: Part of the batch that may lack a score.

    Raises:
        RewardError: More of it does.
    """
    unscorable = score.sums.isnan() & ~score.inapplicable
    count = int(unscorable.sum())
    if count <= allowed * len(unscorable):
        return
    wanted = weights.isfinite() & (weights != 0)
    silent = (per_function.isnan() & wanted & unscorable[:, None]).sum(dim=0)
    blame = ", ".join(
        f"{name} ({missing} without a value)"
        for name, missing in zip(names, silent.tolist(), strict=True)
        if missing
    )
    first = failures[0] if failures else "none: the functions had no value"
    several = len(names) > 1
    # which may return None for a response that they have nothing to say about
    advice = "list those whose value may be missing under optional, " if several else ""
    raise RewardError(
        f"{'not every' if several else 'no'} reward could score {count} of {len(unscorable)} "
        f"responses (the first is response {int(unscorable.nonzero()[0])}; allowed: "
        f"{allowed:.0%}). Functions: {blame}. Repair them, give them "
        f"more time with timeout, {advice}or accept more with max_unscorable_fraction. First "
        f"failure: {first}"
    )
