"""SIGTERM and Ctrl-C as notes, for programs that end in their own time."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def noted_signals(*, second_interrupts: bool = False) -> Iterator[list[signal.Signals]]:
    """Note SIGTERM and Ctrl-C instead of ending.

    Args:
        second_interrupts: Raise KeyboardInterrupt at the second.

    Yields:
        The signals that came.
    """
    came: list[signal.Signals] = []

    def note(number: int, _: object) -> None:
        came.append(signal.Signals(number))
        if second_interrupts and len(came) > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
