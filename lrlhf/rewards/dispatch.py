"""Runs reward functions side by side, each with a timeout."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple

_GIVEN_UP: contextvars.ContextVar[threading.Event] = contextvars.ContextVar("given_up")
"""Of the call that runs in this thread: set when it has run out of time."""


def out_of_time() -> bool:
    """Whether the call of the reward function that asks has run out of time.

    A thread cannot be stopped from outside: a function that computes for long asks now and then,
    and stops if nobody waits for its values any more. Async functions are cancelled instead.
    """
    given_up = _GIVEN_UP.get(None)
    return given_up is not None and given_up.is_set()


class Call(NamedTuple):
    """One function and what it is called with."""

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    unlimited: bool = False
    """It may take as long as it takes."""


class _Started(NamedTuple):
    """A call under way."""

    future: Future[Any]
    given_up: threading.Event


class Outcome(NamedTuple):
    """What became of a call: a value, or an error."""

    value: Any
    error: BaseException | None


class CallTimeoutError(TimeoutError):
    """A reward function took longer than allowed."""


class Dispatcher:
    """Runs plain functions in threads and async ones on one event loop in the background.

    A thread cannot be stopped: one that ran out of time is told so (`out_of_time`) and left behind
    with its result, and its function is not entered again before it is done. The threads are
    daemons, so that a function that hangs does not keep the process alive (which is why this is no
    ThreadPoolExecutor).

    Args:
        timeout: Seconds that every function may take whose call is not unlimited; None: no limit.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = threading.Lock()
        self._busy: dict[str, threading.Lock] = {}

    def __reduce__(self) -> tuple[type[Dispatcher], tuple[float | None]]:
        return Dispatcher, (self._timeout,)  # a copy starts without threads

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Run all calls at once, and wait until the last has ended or run out of time."""
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        started = [self._start(call) for call in calls]
        return [
            self._outcome(call, its, None if call.unlimited else deadline)
            for call, its in zip(calls, started, strict=True)
        ]

    def _start(self, call: Call) -> _Started:
        given_up = threading.Event()
        work = functools.partial(call.function, **call.arguments)
        if is_async(call.function):
            awaited = asyncio.run_coroutine_threadsafe(_awaited(work), self._running_loop())
            return _Started(awaited, given_up)
        started = _Started(Future(), given_up)
        lock = self._busy.setdefault(call.name, threading.Lock())
        timeout = None if call.unlimited else self._timeout
        threading.Thread(
            target=self._work,
            args=(started, lock, work, timeout),
            name=f"reward-{call.name}",
            daemon=True,
        ).start()
        return started

    def _work(
        self,
        started: _Started,
        lock: threading.Lock,
        work: Callable[[], Any],
        timeout: float | None,
    ) -> None:
        future = started.future
        if not lock.acquire(timeout=-1 if timeout is None else timeout):
            return  # an earlier call still hangs
        _GIVEN_UP.set(started.given_up)
        try:
            if future.set_running_or_notify_cancel():  # else out of time before its turn came
                future.set_result(self._settled(work(), timeout))
        except BaseException as error:  # noqa: BLE001  whatever it is, the caller is told
            future.set_exception(error)
        finally:
            lock.release()

    def _settled(self, result: Any, timeout: float | None) -> Any:
        """Wait for what a plain function returned, if it is an awaitable."""
        if not inspect.isawaitable(result):
            return result
        inner = asyncio.run_coroutine_threadsafe(_awaited(lambda: result), self._running_loop())
        try:
            return inner.result(timeout)
        finally:
            inner.cancel()

    def _outcome(self, call: Call, started: _Started, deadline: float | None) -> Outcome:
        future = started.future
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            error = future.exception(remaining)
        except TimeoutError:
            started.given_up.set()
            future.cancel()
            return Outcome(None, CallTimeoutError(self._too_slow(call)))
        except CancelledError as cancelled:  # by the function itself
            return Outcome(None, cancelled)
        return Outcome(None, error) if error is not None else Outcome(future.result(), None)

    def _too_slow(self, call: Call) -> str:
        advice = (
            "an async function must not block its event loop"
            if is_async(call.function)
            else "its thread goes on, and its result is dropped"
        )
        return f"no result after {self._timeout:g} s; {advice}"

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._loop_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=_serve, args=(self._loop,), name="reward-loop", daemon=True
                ).start()
                weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(_cancel_the_rest())
        loop.close()


async def _cancel_the_rest() -> None:
    unfinished = asyncio.all_tasks() - {asyncio.current_task()}
    for task in unfinished:
        task.cancel()
    await asyncio.gather(*unfinished, return_exceptions=True)


async def _awaited(work: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await work()
    except SystemExit as error:  # would end the event loop, and with it every other function
        raise RuntimeError(f"the reward function called sys.exit({error.code!r})") from error


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a function, or the ``__call__`` of an object, is a coroutine function."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )
