"""Notices reward functions that say the same of everything."""

from __future__ import annotations

import logging
import math

from lrlhf.rewards import RewardResult

logger = logging.getLogger(__name__)

_ITERATIONS = 5
_RESPONSES = 64


class ConstantRewards:
    """Warns of each reward function with the same value for every response from the start on.

    Such a function teaches nothing, and nothing else says so where others beside it do differ. It
    is looked at until five iterations and 64 responses of this process are over; functions of
    weight 0 are left out, and so is a response without a value.
    """

    def __init__(self) -> None:
        self._iterations = 0
        self._settled = False
        self._counts: dict[str, int] = {}
        self._ranges: dict[str, tuple[float, float]] = {}

    def observe(self, result: RewardResult, *, chats: bool) -> None:
        """Take in the scores of an iteration, and warn once that is due.

        Args:
            result: Of the iteration's responses.
            chats: Whether the prompts are chats, so that responses are lists of messages.
        """
        if self._settled:
            return
        self._iterations += 1
        for column, name in enumerate(result.names):
            values = result.per_function[:, column]
            kept = values.isfinite()
            if result.weights is not None:
                kept &= result.weights[:, column].nan_to_num(nan=0.0) != 0
            if not kept.any():
                continue
            low, high = self._ranges.get(name, (math.inf, -math.inf))
            values = values[kept]
            self._ranges[name] = min(low, float(values.min())), max(high, float(values.max()))
            self._counts[name] = self._counts.get(name, 0) + len(values)
        over = max(self._counts.values(), default=0) >= _RESPONSES
        if self._iterations >= _ITERATIONS and over:
            self._settled = True
            self._warn(chats)

    def _warn(self, chats: bool) -> None:
        remark = (
            " The prompts are chats (messages, or as_chat), so completions are lists of messages: "
            "a function that looks for text takes lrlhf.rewards.completion_text of each."
        )
        for name, (low, high) in self._ranges.items():
            if low == high and self._counts[name] >= _RESPONSES:
                logger.warning(
                    "the reward function %r has returned %g for each of the first %d responses, "
                    "so it has taught nothing so far; `lrlhf reward RUN` shows what the rewards "
                    "say of a run's responses.%s",
                    name,
                    low,
                    self._counts[name],
                    remark if chats else "",
                )
