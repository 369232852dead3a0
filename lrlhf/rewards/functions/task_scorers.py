"""The scorers of reasoning-gym, for a process of their own: imports nothing of this library.

Some of them evaluate a response as Python or as mathematics of any size.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

with warnings.catch_warnings():
    # a dependency compares text with `is`, which Python warns of once
    warnings.simplefilter("ignore", SyntaxWarning)
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

# what they raise at answers that they do not expect, such as words for a number
_UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)


class RewardError(ValueError):
    """Known by its name where the reply is read."""


def score(
    task: Sequence[str], answer: Sequence[str | None], entry: Sequence[Mapping[str, Any]]
) -> list[float | None]:
    """Return each answer's score from 0 to 1; None where the task's scorer cannot read it."""
    return [_score(*row) for row in zip(task, answer, entry, strict=True)]


def _score(task: str, answer: str | None, entry: Mapping[str, Any]) -> float | None:
    if task not in DATASETS:
        close = difflib.get_close_matches(task, list(DATASETS), n=1, cutoff=0.5)
        advice = f"; did you mean {close[0]!r}?" if close else ""
        raise RewardError(f"reasoning-gym has no task {task!r}{advice}")
    scorer = reasoning_gym.get_score_answer_fn(task)
    try:
        return float(scorer(answer, entry))
    except _UNREADABLE:
        return None
