"""Reward functions that take their time."""

import time
from collections.abc import Sequence


def waits(completions: Sequence[str]) -> list[float]:
    time.sleep(50)
    return [0.0 for _ in completions]
