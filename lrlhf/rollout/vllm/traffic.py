"""What all calls of one rank have open at each server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from lrlhf.rollout.vllm.client import ServerClient


@dataclass
class _Server:
    open: int = 0
    heard: float = 0.0


class Traffic:
    """Shares the places at servers between calls, first come, first served.

    It also has one clock per server: a request may wait there for those of another call, and what
    that one hears shows that the server gets on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: WeakKeyDictionary[ServerClient, _Server] = WeakKeyDictionary()
        self._waiting: dict[int, Callable[[], object]] = {}
        self._calls = 0

    def enter(self) -> int:
        """Return the number of a call that begins."""
        with self._lock:
            self._calls += 1
            return self._calls

    def may_place(self, call: int, wake: Callable[[], object]) -> bool:
        """Whether it is a call's turn to take places.

        Args:
            call: Its number.
            wake: Called, from any thread, whenever it is worthwhile to ask again, until `placed`.
        """
        with self._lock:
            self._waiting[call] = wake
            return call == min(self._waiting)

    def placed(self, call: int) -> None:
        """Hear that a call needs no place at present."""
        with self._lock:
            if self._waiting.pop(call, None) is not None:
                self._wake_first()

    def has_place(self, server: ServerClient, most: int) -> bool:
        """Whether a server with ``most`` places has one free."""
        with self._lock:
            return self._of(server).open < most

    def opened(self, server: ServerClient, count: int) -> None:
        """Hear of requests that a server is sent."""
        with self._lock:
            found = self._of(server)
            if not found.open:
                found.heard = time.monotonic()
            found.open += count

    def closed(self, server: ServerClient, *, answered: bool) -> None:
        """Hear that a request is over, and whether that tells that the server gets on."""
        with self._lock:
            found = self._of(server)
            found.open -= 1
            if answered:
                found.heard = time.monotonic()
            self._wake_first()

    def silence(self, server: ServerClient) -> float:
        """Return for how many seconds a server with open requests has answered none."""
        with self._lock:
            return time.monotonic() - self._of(server).heard

    def _of(self, server: ServerClient) -> _Server:
        return self._servers.setdefault(server, _Server())

    def _wake_first(self) -> None:
        if self._waiting:
            self._waiting[min(self._waiting)]()
