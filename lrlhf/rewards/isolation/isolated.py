"""Reward functions in a process of their own."""

from __future__ import annotations

import inspect
import logging
import math
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lrlhf.rewards.function import (
    OTHER_REWARDS,
    CopiesStartAfresh,
    PartialValues,
    RewardError,
    check_positive,
    completion_segments,
    first_failure,
)
from lrlhf.rewards.isolation.isolated_worker import Worker, WorkerError
from lrlhf.rewards.lookup import NamedFunction, bind_functions, chosen_arguments, unwrapped
from lrlhf.rewards.reward_values import Journal, check_values

logger = logging.getLogger(__name__)

_LOGGERS = ("log_metric", "log_extra")


class IsolatedFailureError(RuntimeError):
    """An isolated reward function scored none of the responses."""


@dataclass
class _Progress:
    """The results of one call so far."""

    deadline: float
    values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    extras: dict[str, dict[int, Any]] = field(default_factory=dict)
    restarts: list[str] = field(default_factory=list)
    """Why a process was killed, once for each."""


class IsolatedReward(CopiesStartAfresh):
    """Runs another reward function in a process of its own, with limits to its time and memory.

    Where the function fails on a batch of responses, it is called again for each one alone, so that
    a response that makes it loop, crash or use too much memory costs only its own value. A process
    that was killed is started anew.

    The process has a temporary working folder, and of the environment only what it needs to run,
    so no keys and tokens. It is a protection against accidents: it runs as the same user, and may
    read files and use the network.

    Args:
        function: Import path, the short name of a built-in one, or ``class_path`` with
            ``init_args``. An import path is imported in the process only.
        timeout: Seconds for a batch of responses, and for each one that is scored alone.
        total_timeout: Seconds for all calls together; what was scored by then counts.
        memory_gb: GB of address space that the function may use on top of what is mapped when it
            is loaded; null: no limit, which functions on a GPU need.
        workers: Processes that share the responses of a batch.
        env: Names of environment variables that the function needs.
        start_timeout: Seconds to import the function and to load what it needs.
    """

    ends_by_itself: ClassVar[bool] = True
    forwards_columns: ClassVar[bool] = True
    _not_copied = ("_workers", "_lock", "_progress")

    def __init__(
        self,
        function: NamedFunction,
        timeout: float = 10.0,
        total_timeout: float = 600.0,
        memory_gb: float | None = 4.0,
        workers: int = 1,
        env: list[str] | None = None,
        start_timeout: float = 60.0,
    ) -> None:
        check_positive(
            timeout=timeout, total_timeout=total_timeout, memory_gb=memory_gb, workers=workers,
            start_timeout=start_timeout,
        )  # fmt: skip
        self._name, self._function = _portable(function)
        self._timeout = timeout
        self._total_timeout = total_timeout
        self._memory_bytes = None if memory_gb is None else int(memory_gb * 1e9)
        self._env = tuple(env or ())
        self._start_timeout = start_timeout
        self._count = workers
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._workers = [
            Worker(self._name, self._function, self._memory_bytes, self._env, self._start_timeout)
            for _ in range(self._count)
        ]
        self._progress: _Progress | None = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Start the processes, if they do not run.

        Raises:
            RewardError: The function cannot be loaded there.
        """
        with self._lock:
            self._start_all()

    def close(self) -> None:
        """End the processes, also in the middle of a call; the next call starts them again."""
        if (progress := self._progress) is not None:
            progress.deadline = 0.0  # nothing is sent again
            for worker in self._workers:
                worker.kill()
        with self._lock:
            for worker in self._workers:
                worker.close()

    def __call__(self, **arguments: Any) -> list[float | None]:
        with self._lock:
            deadline = time.monotonic() + self._total_timeout
            self._start_all()
            count = len(arguments["completions"])
            progress = self._progress = _Progress(deadline)
            if count:
                signature = _signature(self._workers[0].greeting)
                chosen = chosen_arguments(self._name, signature, arguments)
                # every process has its part of the responses, as equal as possible
                parts = [range(start, count, self._count) for start in range(self._count)]
                with ThreadPoolExecutor(self._count) as threads:
                    futures = [
                        threads.submit(self._score, progress, worker, chosen, rows)
                        for worker, rows in zip(self._workers, parts, strict=True)
                        if rows
                    ]
                for future in futures:
                    future.result()
            self._progress = None
        return self._report(progress, count, arguments)

    def _start_all(self) -> None:
        if all(worker.alive for worker in self._workers):
            return
        try:
            with ThreadPoolExecutor(self._count) as threads:
                for _ in threads.map(Worker.start, self._workers):
                    pass
        except WorkerError as error:
            raise RewardError(f"{self._name!r} cannot be started in a process: {error}") from error

    def _score(
        self, progress: _Progress, worker: Worker, arguments: Mapping[str, Any], rows: Sequence[int]
    ) -> None:
        """Have some responses scored, and if that fails one after the other."""
        failure = self._attempt(progress, worker, arguments, rows)
        if not failure:
            return
        if len(rows) == 1:
            progress.failures[rows[0]] = failure
            return
        logger.warning(
            "%s failed on %d responses at once and scores each alone: %s",
            self._name,
            len(rows),
            failure.splitlines()[-1],
        )
        for row in rows:
            if alone := self._attempt(progress, worker, arguments, [row]):
                progress.failures[row] = alone

    def _attempt(
        self, progress: _Progress, worker: Worker, arguments: Mapping[str, Any], rows: Sequence[int]
    ) -> str:
        """Have a process score some responses; return what went wrong, empty if nothing did."""
        remaining = progress.deadline - time.monotonic()
        if remaining <= 0:
            return f"no time is left of total_timeout = {self._total_timeout:g} s"
        seconds = min(self._timeout, remaining)
        try:
            reply = worker.send(_request(arguments, rows, seconds), seconds, remaining)
            if "error" not in reply:
                self._add(progress, reply, rows)
                return ""
            if not worker.alive:
                progress.restarts.append(str(reply["kind"]))
            return str(reply["error"])
        except WorkerError as error:
            worker.close()
            progress.restarts.append(str(error))
            return str(error)

    def _add(self, progress: _Progress, reply: Mapping[str, Any], rows: Sequence[int]) -> None:
        """Add the content of a reply, which may be anything."""
        journal = Journal(len(rows))
        try:
            for name, value in reply["metrics"]:
                journal.log_metric(name, value)
            for column, entries in reply["extras"].items():
                journal.log_extra(column, entries)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise WorkerError(f"its reply cannot be read: {error!r}") from None
        logged = journal.close()
        values = reply.get("values")
        check_values(values, function=self._name, rows=rows)  # their number; each one comes later
        assert isinstance(values, list)
        progress.values.update(zip(rows, values, strict=True))
        for name, numbers in logged.metrics.items():
            progress.metrics += [(name, number) for number in numbers]
        for column, entries in logged.extras.items():
            progress.extras.setdefault(column, {}).update(zip(rows, entries, strict=True))

    def _report(
        self, progress: _Progress, count: int, arguments: Mapping[str, Any]
    ) -> list[float | None]:
        """Log what the function logged, and report what failed."""
        failures = progress.failures
        for name, value in progress.metrics:
            arguments["log_metric"](name, value)
        for column, entries in progress.extras.items():
            arguments["log_extra"](column, [entries.get(row) for row in range(count)])
        arguments["log_metric"]("isolated/restarts", len(progress.restarts))
        arguments["log_metric"]("isolated/failures", len(failures))
        values = [math.nan if row in failures else progress.values.get(row) for row in range(count)]
        if not failures:
            return values
        what = f"{self._name} failed on {len(failures)} of {count} responses"
        failure = first_failure(failures, what)
        if len(failures) == count:
            raise IsolatedFailureError(failure)
        return PartialValues(values, failure)


def _portable(function: NamedFunction) -> tuple[str, str | bytes]:
    """Return a function's name, and its import path or pickle for another process."""
    if isinstance(function, str) and "." in function:
        return function.rpartition(".")[2], function
    (bound,) = bind_functions([function])
    inner = unwrapped(bound.function)
    module = inner.__module__ if inspect.isroutine(inner) else type(inner).__module__
    if module == "__main__":
        raise ValueError(
            f"function {bound.name!r} is defined in the script that was started, where "
            "another process does not find it: move it to a module, and give its import path"
        )
    try:
        return bound.name, pickle.dumps(bound.function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"function {bound.name!r} cannot be sent to another process ({error}): define it at "
            "the top of a module, and give its import path"
        ) from error


def _signature(greeting: Mapping[str, Any]) -> inspect.Signature:
    """Return the signature that the process reports of its function."""
    takes, requires = greeting.get("takes"), greeting.get("requires", [])
    names = requires if takes is None else takes
    parameters = [
        inspect.Parameter(
            str(name),
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if name in requires else None,
        )
        for name in names
    ]
    if takes is None:
        parameters.append(inspect.Parameter("others", inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _request(arguments: Mapping[str, Any], rows: Sequence[int], seconds: float) -> dict[str, Any]:
    data = {
        name: {key: [column[row] for row in rows] for key, column in values.items()}
        if name == OTHER_REWARDS and isinstance(values, Mapping)
        else [values[row] for row in rows]
        for name, values in arguments.items()
        if name not in _LOGGERS
    }
    loggers = [name for name in _LOGGERS if name in arguments]
    request = {"arguments": data, "count": len(rows), "seconds": seconds, "loggers": loggers}
    # the pickle of a completion has no segments; plain tuples need no library in the process
    segments = [[*map(tuple, completion_segments(each))] for each in data.get("completions", ())]
    if any(len(own) > 1 for own in segments):
        request["segments"] = [own if len(own) > 1 else None for own in segments]
    return request
