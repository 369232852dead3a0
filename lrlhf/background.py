"""Work beside the main thread that never keeps the process alive."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def in_background(call: Callable[[], ResultT], *, name: str) -> Future[ResultT]:
    """Start ``call`` in a daemon thread; the future gets its result or its error.

    Threads of a ``ThreadPoolExecutor`` are waited for when the interpreter ends, which would keep
    an interrupted run waiting for responses that nobody wants any more.
    """
    future: Future[ResultT] = Future()
    future.set_running_or_notify_cancel()  # what runs in a thread cannot be cancelled

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  the future raises it where it is asked for
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class EventLoop:
    """An asyncio event loop in a daemon thread of its own, started when it is first needed.

    It ends with the object that holds it, and what is unfinished by then is cancelled. A forked
    process, which has a copy of the object and none of its thread, gets a loop of its own.

    Args:
        name: Of the thread.
    """

    _loop: asyncio.AbstractEventLoop | None
    _thread: threading.Thread | None
    _lock: threading.Lock

    def __init__(self, name: str) -> None:
        self._name = name
        self._forget()
        _EVENT_LOOPS.add(self)

    def __reduce__(self) -> tuple[type[EventLoop], tuple[str]]:
        return EventLoop, (self._name,)  # a copy starts without a thread

    def submit(self, awaitable: Awaitable[ResultT]) -> Future[ResultT]:
        """Have the loop run an awaitable."""
        return asyncio.run_coroutine_threadsafe(_awaited(awaitable), self._running())

    def answers(self, seconds: float) -> bool:
        """Tell whether the loop runs, or something that it runs keeps it from going on."""
        try:
            self.submit(asyncio.sleep(0)).result(seconds)
        except TimeoutError:
            return False
        return True

    def close(self, seconds: float) -> None:
        """Cancel what is unfinished, and wait until the thread has ended.

        Args:
            seconds: To wait; a thread in a call that does not return is left to itself.
        """
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            _stop(loop)
            thread.join(seconds)

    def _forget(self) -> None:
        self._loop = self._thread = None
        self._lock = threading.Lock()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name=self._name, daemon=True
                )
                self._thread.start()
                weakref.finalize(self, _stop, self._loop)
            return self._loop


_EVENT_LOOPS: weakref.WeakSet[EventLoop] = weakref.WeakSet()


def _forget_all() -> None:
    for event_loop in [*_EVENT_LOOPS]:
        event_loop._forget()


os.register_at_fork(after_in_child=_forget_all)


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(loop.stop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
            break
        except (SystemExit, KeyboardInterrupt):  # raised in a task: the task has ended, not others
            continue
    loop.run_until_complete(_cancel_the_rest())
    loop.close()


async def _cancel_the_rest() -> None:
    unfinished = asyncio.all_tasks() - {asyncio.current_task()}
    for task in unfinished:
        task.cancel()
    await asyncio.gather(*unfinished, return_exceptions=True)


async def _awaited(result: Awaitable[Any]) -> Any:
    try:
        return await result
    except SystemExit as error:  # would end the event loop, and with it every other function
        raise RuntimeError(f"the function called sys.exit({error.code!r})") from error
