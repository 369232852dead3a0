"""Scoring responses one after the other, where one of them may take for ever.

Two scorers have a limit of time: a function in a process of its own, and a regular expression of
the configuration.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import regex

from lrlhf.rewards.dispatch import until_timeout
from lrlhf.rewards.function import (
    PartialValues,
    RewardError,
    before_open_thought,
    first_failure,
    outside_thoughts,
)
from lrlhf.rewards.isolation.isolated_worker import Worker, WorkerError
from lrlhf.rewards.reward_values import finite_number

_MEMORY_BYTES = 4 * 10**9
_START_S = 120.0
_LEAST_SHARE = 0.05
_TIMEOUT_S = 5.0
_LITERAL_BRACE = re.compile(r"(?<!\\)(?<!\\N)((?:\\\\)*)\{(?!\d*,?\d*\})")
"""A brace that ``re`` takes as it stands and ``regex`` for leave to match something similar."""


class UnscorableError(Exception):
    """A response that could not be scored in time, or made its scorer fail."""


def scores_one_by_one(
    score: Callable[[int, float], float | None], count: int
) -> list[float | None]:
    """Score one response after the other; one that cannot be scored gets 0, and is reported.

    Were it left out instead, one such response could stop a run of small batches, and every resume
    of it, which draws the same responses. It counts as a failure, so that a run with a broken
    scorer ends. Each one halves the time of those after it, so that many of them do not use up the
    time of the batch.

    Args:
        score: Receives the index of the response, and its share of the usual time; raises
            `UnscorableError`.
        count: Responses.
    """
    values: list[float | None] = []
    reasons: dict[int, str] = {}
    for row in until_timeout(range(count)):
        try:
            values.append(score(row, max(_LEAST_SHARE, 0.5 ** len(reasons))))
        except UnscorableError as error:
            values.append(0.0)
            reasons[row] = str(error)
    if not reasons:
        return values
    what = f"{len(reasons)} of {count} responses could not be scored and count 0"
    return PartialValues(values, first_failure(reasons, what), failed=len(reasons))


class OneByOne:
    """A function that scores one response at a time, in a process of its own.

    For libraries that evaluate texts: a policy can write one that keeps them busy for hours, with
    Python's lock held, so that no thread can stop them. The process is killed then, and a new one
    started for the next response.

    Args:
        function: ``file.py:name`` in this folder. The process imports the file alone and not this
            package, so that it starts in a second; the function takes and returns lists.
    """

    def __init__(self, function: str) -> None:
        source = str(Path(__file__).with_name(function))
        self._function = function
        self._worker = Worker(function, source, _MEMORY_BYTES, (), _START_S)
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process, if it does not run.

        Raises:
            RewardError: The function cannot be loaded.
        """
        with self._lock:
            try:
                self._worker.start()
            except WorkerError as error:
                raise RewardError(f"{self._function} cannot be started: {error}") from error

    def score(self, timeout: float, **arguments: Any) -> float | None:
        """Return the function's value of one response.

        Args:
            timeout: Seconds.
            arguments: Of the function, the response's entry of each list.

        Raises:
            UnscorableError: It took too long, raised, or ended its process.
            RewardError: The function raised one, or cannot be loaded.
        """
        lists = {name: [value] for name, value in arguments.items()}
        request = {"arguments": lists, "seconds": timeout, "loggers": []}
        with self._lock:
            try:
                reply = self._worker.send(request, timeout)
            except WorkerError as error:
                raise UnscorableError(str(error)) from None
        if "error" in reply:
            raise UnscorableError(str(reply["error"]))
        (value,) = reply["values"]
        return None if value is None else finite_number(value)


def shared(function: str) -> OneByOne:
    """Return the process of a function that all rewards of this process share."""
    return _shared(function, os.getpid())


@functools.cache
def _shared(function: str, _owner: int) -> OneByOne:
    return OneByOne(function)


class TextPattern:
    """A regular expression whose ``.`` matches line breaks too, with a limit to its time.

    Python's own ``re`` has none, and holds Python's lock while it backtracks.

    Args:
        pattern: In the syntax of ``re``.
        setting: Its option, for the error.

    Raises:
        ValueError: It is not valid.
    """

    def __init__(self, pattern: str, setting: str) -> None:
        try:
            re.compile(pattern, re.DOTALL)
            self._pattern = regex.compile(_LITERAL_BRACE.sub(r"\1\\{", pattern), regex.DOTALL)
        except (re.error, regex.error) as error:
            raise ValueError(f"{setting} {pattern!r} is no regular expression: {error}") from error

    def matches(self, text: str, *, full: bool, share: float = 1.0) -> bool:
        """Return whether the text has a match; with ``full``, whether all of it is one.

        ``share`` is the part of the usual time that it may take.

        Raises:
            UnscorableError: It takes longer.
        """
        match = self._pattern.fullmatch if full else self._pattern.search
        try:
            return match(text, timeout=share * _TIMEOUT_S) is not None
        except TimeoutError:
            raise self._timeout_error(share) from None

    def last(self, text: str, *, share: float = 1.0) -> str | None:
        """Return the last match, or its first group, if there is one and it took part.

        Raises:
            UnscorableError: It takes longer than ``share`` of the usual time.
        """
        try:
            matches = list(self._pattern.finditer(text, timeout=share * _TIMEOUT_S))
        except TimeoutError:
            raise self._timeout_error(share) from None
        if not matches:
            return None
        group = matches[-1].group(1) if self._pattern.groups else None
        return str(matches[-1].group(0) if group is None else group)

    def _timeout_error(self, share: float) -> UnscorableError:
        return UnscorableError(
            f"the regular expression {self._pattern.pattern!r} was not done with it after "
            f"{share * _TIMEOUT_S:.2g} s of CPU time: write it so that no text can be matched in "
            "many ways"
        )


def extracted(text: str, pattern: TextPattern | None, share: float = 1.0) -> str | None:
    """Return the answer in a response: outside of thoughts, or the last match of a pattern.

    Raises:
        UnscorableError: The pattern takes longer than ``share`` of the usual time.
    """
    if pattern is None:
        return outside_thoughts(text)
    return pattern.last(before_open_thought(text), share=share)
