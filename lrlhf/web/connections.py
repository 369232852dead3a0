"""Connections of clients: how much, and how long, they may send before they are known."""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
from collections.abc import Callable
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_BYTES: Final = 16_384
"""Of a request line and its headers."""
_MAX_HEADERS: Final = 100
_HEAD_SECONDS: Final = 10.0
"""From the first letter of a request, or from the connection, to the end of the head."""
_ANSWER_SECONDS: Final = 10.0
"""For the answer to reach the client, and for what it sends still after that."""
KEEP_ALIVE_SECONDS: Final = 30
_OTHER_FILES: Final = 128
"""That the process opens beside connections."""
_FEWEST: Final = 16

_SENTENCES: Final = {
    400: "this is no HTTP request",
    411: "send the length of the body: chunks are not accepted",
    431: f"the head of a request may have {HEAD_BYTES} bytes and {_MAX_HEADERS} headers",
    501: "no other transfer encoding than the plain one is known",
}


class Door:
    """Keeps as many connections as there is room for, and sends strangers away first.

    A connection is known once a request on it had the right token. When there is no room for
    another connection, the stranger that came first has to go; then, a known one that asks nothing.
    A request may take so many seconds from the end of its head; ``refuse`` is told why a connection
    was ended.
    """

    def __init__(self, most: int, seconds: float, refuse: Callable[[str], None]) -> None:
        self.seconds = seconds
        self.refuse = refuse
        self._most = most
        self._connections: dict[Connection, None] = {}  # as a set that keeps the order

    def enter(self, connection: Connection) -> None:
        """Let a connection in, perhaps in the place of another one."""
        self._connections[connection] = None
        if len(self._connections) > self._most:
            self.refuse("no room for connections")
            *others, last = self._connections
            strangers = (each for each in others if not each.known)
            idle = (each for each in others if not each.asks)
            next(itertools.chain(strangers, idle), last).end()

    def leave(self, connection: Connection) -> None:
        """Note that a connection has ended."""
        self._connections.pop(connection, None)


class Connection(H11Protocol):
    """A connection that ends by itself, whatever the client does or leaves undone.

    At any time it waits for one thing: the end of a head, an answer, or the next request. Each has
    its seconds, after which the connection is cut.
    """

    def __init__(self, door: Door, **options: Any) -> None:
        super().__init__(**options)
        self.conn = self._reader = _Reader(self._begin)
        self._door = door
        self._deadline: asyncio.TimerHandle | None = None
        self._was_known = False
        self._pausing = False

    @property
    def known(self) -> bool:
        """Whether a request on it had the right token."""
        return self._was_known or bool(self.scope and self.scope["state"].get("known"))

    @property
    def asks(self) -> bool:
        """Whether a request on it waits for its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def end(self) -> None:
        """Cut the connection, whatever is still to be sent."""
        self._door.leave(self)
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(_HEAD_SECONDS)
        self._door.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.leave(self)
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._pausing:
            self._pausing = False
            self._expect(_HEAD_SECONDS)
        # a head that comes at once is held to its length too
        for start in range(0, len(data), HEAD_BYTES):
            if self.transport.is_closing():
                return
            super().data_received(data[start : start + HEAD_BYTES])

    def on_response_complete(self) -> None:
        self._was_known = self.known
        self._pausing = True
        self._expect(KEEP_ALIVE_SECONDS + _ANSWER_SECONDS)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        reader = self._reader
        self._door.refuse("no request")
        if self.asks or reader.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.end()  # in the middle of an answer
            return
        content = json.dumps({"detail": _SENTENCES[reader.refused]}).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(content))),
            ("connection", "close"),
        ]
        answer: list[h11.Event] = [
            h11.Response(status_code=reader.refused, headers=headers),
            h11.Data(data=content),
            h11.EndOfMessage(),
        ]
        self.transport.write(b"".join(reader.send(event) or b"" for event in answer))
        self.transport.close()

    def _begin(self) -> None:
        self._pausing = False
        self._expect(self._door.seconds + _ANSWER_SECONDS)

    def _expect(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        if not self._pausing:
            self._door.refuse("slow client")
        self.end()


class _Reader(h11.Connection):
    """Reads requests, and refuses those that would cost more than they are worth.

    Chunks of a byte each would keep the process busy with next to nothing, and their extensions
    and trailers are further places for what nobody wants.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES)
        self._begin = begin
        self.refused = 400

    def next_event(self) -> Any:
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._check(event)
                self._begin()
        except h11.RemoteProtocolError as error:
            hint = error.error_status_hint
            self.refused = hint if hint in _SENTENCES else 400
            raise
        return event

    def _check(self, request: h11.Request) -> None:
        if len(request.headers) > _MAX_HEADERS:
            raise h11.RemoteProtocolError("too many headers", error_status_hint=431)
        if any(name == b"transfer-encoding" for name, _ in request.headers):
            raise h11.RemoteProtocolError("chunks", error_status_hint=411)


def room_for(connections: int) -> int:
    """Have the system allow open files for so many connections; return how many it allows."""
    needed = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        return max(_FEWEST, allowed - _OTHER_FILES)
    return connections
