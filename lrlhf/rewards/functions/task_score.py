"""The scores of procedurally made tasks."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from lrlhf.rewards.function import (
    Completion,
    LogMetric,
    RewardError,
    RewardFunction,
    check_positive,
    column_of,
    completion_text,
)
from lrlhf.rewards.functions.one_by_one import TextPattern, extracted, scores_one_by_one, shared
from lrlhf.types import Episode

_SCORERS = "task_scorers.py:score"
_COLUMNS = ("question", "answer", "metadata")


class ReasoningGymScore(RewardFunction):
    """The score of the ``reasoning-gym`` task's own scorer, from 0 to 1.

    Needs the columns ``question``, ``answer`` and ``metadata`` of
    ``lrlhf.datamodules.ReasoningGym``; rows of several tasks may be mixed. Rows without
    ``metadata`` get no score. A response that the task's scorer cannot read, or does not finish
    with in time, gets 0, and ``rewards/reasoning_gym/unreadable`` counts it. The scorers run in a
    process of their own: some of them evaluate the response. Thoughts up to ``</think>`` are no
    part of the answer; a thought that is never closed has none.

    Args:
        strict: 1 for full marks, else 0; otherwise partial credit counts, which many tasks give
            to a right answer inside a longer text.
        extract: Regular expression; its last match in the response (or the first group of that,
            if it has one) is the answer. Without a match there is no answer.
        timeout: Seconds that the task's scorer may take for one response.
    """

    @classmethod
    def columns_read(cls, options: Mapping[str, Any]) -> Iterable[str]:
        return _COLUMNS

    def __init__(
        self, strict: bool = False, extract: str | None = None, timeout: float = 10.0
    ) -> None:
        check_positive(timeout=timeout)
        self._strict = strict
        self._extract = None if extract is None else TextPattern(extract, "extract")
        self._timeout = timeout

    def prepare(self) -> None:
        """Start the process with reasoning-gym, which takes seconds.

        Raises:
            ImportError: It is not installed.
        """
        _load()

    def __call__(
        self, *, completions: Sequence[Completion], log_metric: LogMetric, **columns: Any
    ) -> list[float | None]:
        data = {name: column_of(columns, name, setting="the data's source") for name in _COLUMNS}
        entries = [
            {name: values[row] for name, values in data.items()} for row in range(len(completions))
        ]
        unreadable: set[int] = set()

        def score(row: int, share: float) -> float | None:
            entry = entries[row]
            if entry["metadata"] is None:
                return None
            unreadable.add(row)
            answer = self._answer(completion_text(completions[row]), share)
            value = shared(_SCORERS).score(
                share * self._timeout, task=_task_of(entry), answer=answer, entry=entry
            )
            if value is not None:
                unreadable.remove(row)
            return float(value >= 1) if self._strict and value is not None else value or 0.0

        scores = scores_one_by_one(score, len(entries))
        log_metric("reasoning_gym/unreadable", len(unreadable) / max(1, len(scores)))
        return scores

    def answer_of(self, text: str) -> str | None:
        """Return the answer for the task's scorer; for majority votes."""
        return self._answer(text)

    def _answer(self, text: str, share: float = 1.0) -> str | None:
        answer = extracted(text, self._extract, share)
        return None if answer is None else answer.strip()


def _task_of(entry: Mapping[str, Any]) -> str:
    metadata = entry["metadata"]
    if not isinstance(metadata, Mapping) or "source_dataset" not in metadata:
        raise RewardError(
            f"column 'metadata' holds {str(metadata)[:80]!r} without 'source_dataset', which names "
            "the task: take the rows from lrlhf.datamodules.ReasoningGym"
        )
    return str(metadata["source_dataset"])


@functools.cache
def _load() -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ImportError(
            "ReasoningGymScore needs the package reasoning-gym: pip install 'lrlhf[tasks]'"
        )
    shared(_SCORERS).start()


class EnvironmentReward(RewardFunction):
    """The sum of an environment's ``reward`` and ``get_reward`` over the turns of an episode.

    Algorithms with credit for single turns use the reward of each, see `Advantage.credit`.
    """

    sums_turns: ClassVar[bool] = True

    def __call__(  # type: ignore[override]  # an argument that only episodes have
        self, *, episodes: Sequence[Episode], **columns: Any
    ) -> list[float | None]:
        """Return the sum of each episode's rewards; None: it failed.

        Raises:
            RewardError: The environment gives no rewards.
        """
        if all(episode.rewards is None and not episode.failure for episode in episodes):
            raise RewardError(
                "the environment has neither reward() nor get_reward(), or the agent returned "
                "None: let it give a reward, or score its episodes with a function of yours that "
                "takes `environments` or `episodes`"
            )
        return [
            None if episode.failure else math.fsum(episode.rewards or ()) for episode in episodes
        ]
