"""Work beside the main thread that never keeps the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

ResultT = TypeVar("ResultT")


def in_background(call: Callable[[], ResultT], *, name: str) -> Future[ResultT]:
    """Start ``call`` in a daemon thread; the future gets its result or its error.

    Threads of a ``ThreadPoolExecutor`` are waited for when the interpreter ends, which would keep
    an interrupted run waiting for responses that nobody wants any more.
    """
    future: Future[ResultT] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  the future raises it where it is asked for
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
