"""Runs reward functions side by side, each with a timeout."""

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
_GIVEN_UP: contextvars.ContextVar[threading.Event] = contextvars.ContextVar("given_up")
"""Of the call that runs in this thread: set when it has run out of time."""


def out_of_time() -> bool:
    """Whether the current call of a reward function has timed out.

    A thread cannot be stopped from outside: a function that computes for long asks now and then,
    and stops if nobody waits for its values any more. Async functions are cancelled instead.
    """
    given_up = _GIVEN_UP.get(None)
    return given_up is not None and given_up.is_set()


def while_wanted(steps: Iterable[_Step]) -> Iterator[_Step]:
    """Go on as long as somebody waits for the values: the device may have other work by then."""
    for step in steps:
        if out_of_time():
            raise CallTimeoutError("the rest is not scored, as the call has run out of time")
        yield step


class Call(NamedTuple):
    """One function and what it is called with."""

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    unlimited: bool = False
    """It may take as long as it takes."""


class Outcome(NamedTuple):
    """What became of a call: a value, or an error."""

    value: Any
    error: BaseException | None
    seconds: float = math.nan
    """That the function took, waiting for its turn left out; NaN where it failed."""


class CallTimeoutError(TimeoutError):
    """A reward function took longer than allowed."""


class Dispatcher:
    """Runs every function in a thread; what async ones await, on one event loop in the background.

    A thread cannot be stopped: one that ran out of time is told so (`out_of_time`) and left behind
    with its result, and its function is not entered again before it is done. The threads are
    daemons, so that a function that hangs does not keep the process alive (which is why this is no
    ThreadPoolExecutor). There is one loop for all calls, as clients that a function keeps belong
    to the loop of their first use.

    Args:
        timeout: Seconds that every function may take whose call is not unlimited; None: no limit.
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
        under_way = [self._start(*each) for each in zip(calls, deadlines, strict=True)]
        outcomes = []
        try:
            for (future, given_up), deadline in zip(under_way, deadlines, strict=True):
                try:
                    error = future.exception(_left(deadline))
                except TimeoutError:
                    _give_up(future, given_up)
                    outcomes.append(Outcome(None, self._too_slow()))
                else:
                    value, seconds = future.result() if error is None else (None, math.nan)
                    outcomes.append(Outcome(value, error, seconds))
        except BaseException:  # an interrupt: nobody wants the rest
            for future, given_up in under_way:
                _give_up(future, given_up)
            raise
        return outcomes

    def _start(self, call: Call, deadline: float | None) -> tuple[Future[Any], threading.Event]:
        under_way: tuple[Future[Any], threading.Event] = Future(), threading.Event()
        threading.Thread(
            target=self._work,
            args=(call, deadline, *under_way),
            name=f"reward-{call.name}",
            daemon=True,
        ).start()
        return under_way

    def _work(
        self,
        call: Call,
        deadline: float | None,
        future: Future[Any],
        given_up: threading.Event,
    ) -> None:
        lock = self._busy.setdefault(call.name, threading.Lock())
        left = _left(deadline)
        if not lock.acquire(timeout=-1 if left is None else left):
            return  # an earlier call still hangs
        _GIVEN_UP.set(given_up)
        try:
            if future.set_running_or_notify_cancel():  # else out of time before its turn came
                begun = time.perf_counter()
                value = self._settled(call.function(**call.arguments), deadline)
                future.set_result((value, time.perf_counter() - begun))
        except BaseException as error:  # noqa: BLE001  whatever it is, the caller is told
            future.set_exception(error)
        finally:
            lock.release()

    def _settled(self, result: Any, deadline: float | None) -> Any:
        """Wait for what a function returned, if it is an awaitable."""
        if not inspect.isawaitable(result):
            return result
        awaited = self._loop.submit(result)
        try:
            return awaited.result(_left(deadline))
        except TimeoutError:
            if awaited.done():  # raised by the function itself
                raise
            raise self._too_slow() from None
        finally:
            awaited.cancel()

    def _too_slow(self) -> CallTimeoutError:
        return CallTimeoutError(
            f"no result after {self._timeout:g} s; what it may still return is dropped"
        )


def _give_up(future: Future[Any], given_up: threading.Event) -> None:
    given_up.set()
    future.cancel()


def _left(deadline: float | None) -> float | None:
    """Return the seconds until a point in time, 0 after it; None: there is none."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a function, or the ``__call__`` of an object, is a coroutine function."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )
