"""A clock that always runs for exactly one thing, so that the times of all things add up."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any


class ExclusiveClock:
    """Charges the main thread's time to the innermost activity that was entered.

    Args:
        rest: What time is charged to outside all activities.
        whole: Activities that keep all that happens inside them.
    """

    def __init__(self, rest: str, whole: Collection[str] = ()) -> None:
        self._whole = frozenset(whole)
        self._stack = [rest]
        self._since = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._main = threading.get_ident()

    def enter(self, activity: str) -> None:
        """Charge what follows to ``activity``; other threads than the first are not measured."""
        if threading.get_ident() == self._main:
            self._charge()
            outer = self._stack[-1]
            self._stack.append(outer if outer in self._whole else activity)

    def leave(self) -> None:
        """Charge what follows to what was charged before `enter`."""
        if threading.get_ident() == self._main:
            self._charge()
            self._stack.pop()

    @contextlib.contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Enter and leave."""
        self.enter(activity)
        try:
            yield
        finally:
            self.leave()

    def wrap(self, activity: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, its time charged to ``activity``."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.during(activity):
                return function(*args, **kwargs)

        return timed

    def watch(self, owner: Any, name: str, activity: str) -> None:
        """Replace a function of a module, class or object by one that is timed."""
        setattr(owner, name, self.wrap(activity, getattr(owner, name)))

    def take(self) -> dict[str, float]:
        """Return the seconds of every activity since the last call; they add up to its distance."""
        self._charge()
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken

    def _charge(self) -> None:
        now = time.perf_counter()
        self._seconds[self._stack[-1]] += now - self._since
        self._since = now
