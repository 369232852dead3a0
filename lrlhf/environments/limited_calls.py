"""Calls of functions that users write: limited in time, and with errors told in words."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from lrlhf.background import in_background


class EnvironmentFailure(RuntimeError):  # noqa: N818  a state of an episode, as EngineFailure
    """An environment raised, took too long, or answered with what cannot be used."""


class OutOfTimeError(TimeoutError):
    """As opposed to a ``TimeoutError`` of the function's own."""


async def answer_of(
    name: str,
    function: Callable[[], Any],
    limit: float,
    *,
    late: Callable[[Any], None] | None = None,
) -> Any:
    """Call a function, see `within`; its errors are the environment's.

    Raises:
        EnvironmentFailure: It raised or took too long.
    """
    try:
        return await within(limit, function, late=late)
    except OutOfTimeError as error:
        raise too_slow(name, limit) from error
    except Exception as error:
        raise failed(name, error) from error


async def within(
    limit: float, function: Callable[[], Any], *, late: Callable[[Any], None] | None = None
) -> Any:
    """Call a function, see `call`, and wait for what it returns.

    A thread that is too slow is left behind: it cannot be stopped. ``late`` gets what it returns
    then.

    Args:
        limit: In seconds.
        function: Without its arguments.
        late: See above.

    Raises:
        OutOfTimeError: It took longer. Whatever else is raised is the function's own.
    """
    threads: list[Future[Any]] = []
    task = asyncio.ensure_future(call(function, threads))
    # wait_for would wait for a task that does not let itself be cancelled
    ended, _ = await asyncio.wait({task}, timeout=limit)
    if not ended:
        task.cancel()
        if late is not None and threads:
            threads[0].add_done_callback(partial(_late, late))
        raise OutOfTimeError
    if task.cancelled():
        raise RuntimeError("it cancelled itself")
    return task.result()


async def call(function: Callable[[], Any], threads: list[Future[Any]]) -> Any:
    """Call a function, in a thread unless it is async.

    Args:
        function: Without its arguments.
        threads: Gets the future of the thread, if there is one.
    """
    if inspect.iscoroutinefunction(function):
        return await contained(function())
    threads.append(in_background(partial(_guarded, function), name="environment"))
    result = await asyncio.wrap_future(threads[0])
    return await contained(result) if inspect.isawaitable(result) else result


def taken_by(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a function takes of a row: what its signature names, or everything."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return dict(row)
    return {one.name: row[one.name] for one in parameters if one.name in row}


def finite_reward(value: Any, name: str) -> float:
    """Return a reward as a number; None is 0.

    Raises:
        EnvironmentFailure: It is no finite number.
    """
    try:
        reward = 0.0 if value is None else float(value)
    except (TypeError, ValueError):
        reward = math.nan
    if not math.isfinite(reward):
        raise EnvironmentFailure(f"{name} returned {value!r:.80}, not a finite number")
    return reward


def too_slow(name: str, limit: float) -> EnvironmentFailure:
    """Return the failure of what did not answer in so many seconds."""
    return EnvironmentFailure(f"{name} took longer than {limit:g} s")


def failed(name: str, error: BaseException) -> EnvironmentFailure:
    """Return the failure of what raised an error."""
    return EnvironmentFailure(f"{name} raised {_summary(error)}")


async def contained(result: Awaitable[Any]) -> Any:
    """Await a result; what would end an event loop becomes an error like others."""
    try:
        return await result
    except _ENDINGS as error:
        raise RuntimeError(_summary(error)) from error


def _guarded(function: Callable[[], Any]) -> Any:
    """Call a function; what would end a thread becomes an error like others."""
    try:
        return function()
    except _ENDINGS as error:
        raise RuntimeError(_summary(error)) from error


def _late(use: Callable[[Any], None], thread: Future[Any]) -> None:
    if thread.exception() is None:
        use(thread.result())


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


_ENDINGS = (SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration)
