"""What the runs on a cluster are scored by."""

import time
from collections.abc import Sequence
from typing import Any

from lrlhf.rewards import completion_segments
from tests.modules.policy_runs import letters


def slow_letters(completions: Sequence[str], **_: Any) -> list[float]:
    """Long enough for a test to see what it interrupts."""
    time.sleep(0.4)
    return letters(completions)


def sampled_characters(completions: Sequence[str], **_: Any) -> list[float]:
    return [
        float(sum(len(part.text) for part in completion_segments(one) if part.sampled))
        for one in completions
    ]
