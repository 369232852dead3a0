"""Runs reward functions concurrently, each with a timeout."""

from __future__ import annotations

import contextvars
import inspect
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from lrlhf.background import EventLoop

_Step = TypeVar("_Step")
_TIMED_OUT: contextvars.ContextVar[threading.Event] = contextvars.ContextVar("timed_out")
"""Of the call that runs in this thread: set when it has run out of time."""


def out_of_time() -> bool:
    """Whether the current call of a reward function has timed out.

    A thread cannot be stopped from outside: a function that computes for long checks this now and
    then, and stops if its values are not awaited any more. Async functions are cancelled instead.
    """
    timed_out = _TIMED_OUT.get(None)
    return timed_out is not None and timed_out.is_set()


def until_timeout(steps: Iterable[_Step]) -> Iterator[_Step]:
    """Yield steps until the call times out: the device may have other work by then.

    Raises:
        CallTimeoutError: It has.
    """
    for step in steps:
        if out_of_time():
            raise CallTimeoutError("the call has run out of time before all was scored")
        yield step


class Call(NamedTuple):
    """One function and its arguments."""

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    unlimited: bool = False
    """It has no timeout."""


class Outcome(NamedTuple):
    """The value of a call, or its error."""

    value: Any
    error: BaseException | None
    seconds: float = math.nan
    """Of the function itself, without waiting for its turn; NaN where it failed."""


class CallTimeoutError(TimeoutError):
    """A reward function took longer than allowed."""


class Dispatcher:
    """Runs every function in a thread; what async ones await, on one event loop in the background.

    A thread cannot be stopped: one that ran out of time can notice (`out_of_time`) and is left
    behind with its result, and its function is not entered again before it is done. The threads
    are daemons, so that a function that hangs does not keep the process alive (which is why this
    is no ThreadPoolExecutor). There is one loop for all calls, as a function's HTTP clients belong
    to the loop of their first use.

    Args:
        timeout: Seconds for every function whose call is not unlimited; None: no limit.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._loop = EventLoop("reward-loop")
        self._busy: dict[str, threading.Lock] = {}

    def __reduce__(self) -> tuple[type[Dispatcher], tuple[float | None]]:
        return Dispatcher, (self._timeout,)  # a copy starts without threads

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Run all calls at once, and wait until the last has ended or run out of time."""
        now = time.monotonic()
        limits = [None if call.unlimited else self._timeout for call in calls]
        deadlines = [None if limit is None else now + limit for limit in limits]
        running: list[tuple[Future[Any], threading.Event]] = []
        for call, deadline in zip(calls, deadlines, strict=True):
            running.append((Future(), threading.Event()))
            threading.Thread(
                target=self._work,
                args=(call, deadline, *running[-1]),
                name=f"reward-{call.name}",
                daemon=True,
            ).start()
        outcomes = []
        try:
            for (future, timed_out), deadline in zip(running, deadlines, strict=True):
                try:
                    error = future.exception(_remaining(deadline))
                except TimeoutError:
                    timed_out.set()
                    future.cancel()
                    outcomes.append(Outcome(None, self._timeout_error()))
                else:
                    value, seconds = future.result() if error is None else (None, math.nan)
                    outcomes.append(Outcome(value, error, seconds))
        except BaseException:  # an interrupt: nothing is awaited any more
            for future, timed_out in running:
                timed_out.set()
                future.cancel()
            raise
        return outcomes

    def _work(
        self,
        call: Call,
        deadline: float | None,
        future: Future[Any],
        timed_out: threading.Event,
    ) -> None:
        lock = self._busy.setdefault(call.name, threading.Lock())
        remaining = _remaining(deadline)
        if not lock.acquire(timeout=-1 if remaining is None else remaining):
            return  # an earlier call still hangs
        _TIMED_OUT.set(timed_out)
        try:
            if future.set_running_or_notify_cancel():  # else out of time before its turn came
                begun = time.perf_counter()
                value = self._awaited(call.function(**call.arguments), deadline)
                future.set_result((value, time.perf_counter() - begun))
        except BaseException as error:  # noqa: BLE001  whatever it is, the caller gets it
            future.set_exception(error)
        finally:
            lock.release()

    def _awaited(self, result: Any, deadline: float | None) -> Any:
        """Wait for the result of a function, if it is an awaitable."""
        if not inspect.isawaitable(result):
            return result
        awaited = self._loop.submit(result)
        try:
            return awaited.result(_remaining(deadline))
        except TimeoutError:
            if awaited.done():  # raised by the function itself
                raise
            raise self._timeout_error() from None
        finally:
            awaited.cancel()

    def _timeout_error(self) -> CallTimeoutError:
        return CallTimeoutError(
            f"no result after {self._timeout:g} s; what it may still return is dropped"
        )


def _remaining(deadline: float | None) -> float | None:
    """Return the seconds until a point in time, 0 after it; None: there is none."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a function, or the ``__call__`` of an object, is a coroutine function."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )
