"""The scores of procedurally made tasks."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lrlhf.rewards.function import (
    Completion,
    LogMetric,
    RewardError,
    RewardFunction,
    column_of,
    completion_text,
    did_you_mean,
)
from lrlhf.rewards.text_rewards import compiled, last_match

_Scorer = Callable[[str | None, Mapping[str, Any]], float]
# what the tasks' scorers raise at answers that they do not expect, such as words for a number
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


class ReasoningGymScore(RewardFunction):
    """What the ``reasoning-gym`` task itself gives the response, from 0 to 1.

    Needs the columns ``question``, ``answer`` and ``metadata`` of
    ``lrlhf.datamodules.ReasoningGym``; rows of several tasks may be mixed. Rows without
    ``metadata`` get no score. A response that the task's scorer cannot read gets 0, and
    ``rewards/reasoning_gym/unreadable`` counts it.

    Args:
        strict: 1 for full marks, else 0; otherwise partial credit counts, which many tasks give
            to a right answer inside a longer text.
        extract: Regular expression; what its last match in the response holds (its first group,
            if it has one) is the answer. Without a match there is no answer.
    """

    def __init__(self, strict: bool = False, extract: str | None = None) -> None:
        self._strict = strict
        self._extract = None if extract is None else compiled(extract, "extract")

    def prepare(self) -> None:
        """Import reasoning-gym, which takes seconds.

        Raises:
            ImportError: It is not installed.
        """
        _load()

    def __call__(
        self, *, completions: Sequence[Completion], log_metric: LogMetric, **columns: Any
    ) -> list[float | None]:
        names = ("question", "answer", "metadata")
        entries = [
            dict(zip(names, values, strict=True))
            for values in zip(
                *(column_of(columns, name, setting="the data's source") for name in names),
                strict=True,
            )
        ]
        scores = [
            None if entry["metadata"] is None else self._score(completion_text(completion), entry)
            for completion, entry in zip(completions, entries, strict=True)
        ]
        unreadable = sum(score == _NOT_READ for score in scores)
        log_metric("reasoning_gym/unreadable", unreadable / max(1, len(scores)))
        return [0.0 if score == _NOT_READ else score for score in scores]

    def _score(self, text: str, entry: Mapping[str, Any]) -> float:
        score_answer = _scorer(_task_of(entry))
        answer = text if self._extract is None else last_match(self._extract, text)
        try:
            score = float(score_answer(None if answer is None else answer.strip(), entry))
        except _UNREADABLE:
            return _NOT_READ
        return float(score >= 1) if self._strict else score


_NOT_READ = -1.0


def _task_of(entry: Mapping[str, Any]) -> str:
    metadata = entry["metadata"]
    if not isinstance(metadata, Mapping) or "source_dataset" not in metadata:
        raise RewardError(
            f"column 'metadata' holds {str(metadata)[:80]!r} without 'source_dataset', which names "
            "the task: take the rows from lrlhf.datamodules.ReasoningGym"
        )
    return str(metadata["source_dataset"])


@functools.cache
def _scorer(task: str) -> _Scorer:
    package, known = _load()
    if task not in known:
        raise RewardError(f"reasoning-gym has no task {task!r}{did_you_mean(task, known)}")
    scorer: _Scorer = package.get_score_answer_fn(task)
    return scorer


@functools.cache
def _load() -> tuple[Any, Mapping[str, Any]]:
    try:
        with warnings.catch_warnings():
            # a dependency compares text with `is`, which Python remarks on once
            warnings.simplefilter("ignore", SyntaxWarning)
            package = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ImportError(
            "ReasoningGymScore needs the package reasoning-gym: pip install 'lrlhf[tasks]'"
        ) from error
    return package, importlib.import_module("reasoning_gym.factory").DATASETS
