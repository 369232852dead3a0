"""Defences that all HTTP services share: limits of connections and bodies, strict JSON, quiet logs.

A `ConnectionLimit` keeps as many `Connection` as there is room for, and each of them ends by itself
if its client is slow. `Body` reads no further than allowed, `parse_json` refuses what is no strict
JSON, and `log_defect` logs an error of the service without what clients have sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import resource
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import h11
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

_DISCARD_BYTES = 64_000_000
_DISCARD_SECONDS = 5.0
HEAD_BYTES: Final = 16_384
"""Of a request line and its headers."""
_MAX_HEADERS: Final = 100
_HEAD_SECONDS: Final = 10.0
"""From the first byte of a request, or from the connection, to the end of the head."""
_ANSWER_SECONDS: Final = 10.0
"""For the answer to reach the client, and for what it sends after that."""
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


class ConnectionLimit:
    """Holds as many connections as there is room for, and ends unauthenticated ones first.

    A connection is known once a request on it had the right token. When there is no room for
    another connection, the oldest unknown one is ended; then, a known one without a request.

    Args:
        most: Connections.
        seconds: That a request may take from the end of its head.
        refuse: Called with the reason why a connection was ended.
    """

    def __init__(self, most: int, seconds: float, refuse: Callable[[str], None]) -> None:
        self.seconds = seconds
        self.refuse = refuse
        self._most = most
        self._connections: dict[Connection, None] = {}  # as a set that keeps the order

    def enter(self, connection: Connection) -> None:
        """Add a connection, perhaps in place of another one."""
        self._connections[connection] = None
        if len(self._connections) > self._most:
            self.refuse("no room for connections")
            *others, last = self._connections
            unknown = (each for each in others if not each.known)
            idle = (each for each in others if not each.has_request)
            next(itertools.chain(unknown, idle), last).end()

    def leave(self, connection: Connection) -> None:
        """Note that a connection has ended."""
        self._connections.pop(connection, None)


class Connection(H11Protocol):
    """A connection that ends by itself, whatever the client does or leaves undone.

    At any time it waits for one thing: the end of a head, an answer, or the next request. Each has
    its seconds, after which the connection is cut.
    """

    def __init__(self, limit: ConnectionLimit, **options: Any) -> None:
        super().__init__(**options)
        self.conn = self._reader = _Reader(self._begin)
        self._limit = limit
        self._deadline: asyncio.TimerHandle | None = None
        self._was_known = False
        self._pausing = False

    @property
    def known(self) -> bool:
        """Whether a request on it had the right token."""
        return self._was_known or bool(self.scope and self.scope["state"].get("known"))

    @property
    def has_request(self) -> bool:
        """Whether a request on it waits for its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def end(self) -> None:
        """Cut the connection, whatever is still to be sent."""
        self._limit.leave(self)
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(_HEAD_SECONDS)
        self._limit.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.leave(self)
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
        self._limit.refuse("no request")
        if self.has_request or reader.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
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
        self._expect(self._limit.seconds + _ANSWER_SECONDS)

    def _expect(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        if not self._pausing:
            self._limit.refuse("slow client")
        self.end()


class _Reader(h11.Connection):
    """Reads requests, and refuses those whose reading costs too much.

    Chunks of a byte each would keep the process busy with next to nothing, and their extensions
    and trailers are further room for it.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES)
        self._begin = begin
        self.refused = 400

    def next_event(self) -> Any:
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                if len(event.headers) > _MAX_HEADERS:
                    raise h11.RemoteProtocolError("too many headers", error_status_hint=431)
                if any(name == b"transfer-encoding" for name, _ in event.headers):
                    raise h11.RemoteProtocolError("chunks", error_status_hint=411)
                self._begin()
        except h11.RemoteProtocolError as error:
            hint = error.error_status_hint
            self.refused = hint if hint in _SENTENCES else 400
            raise
        return event


def allowed_connections(connections: int) -> int:
    """Have the system allow open files for so many connections; return how many it allows."""
    needed = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        return max(_FEWEST, allowed - _OTHER_FILES)
    return connections


class RefusedRequestError(ValueError):
    """A request that is answered with a status and one sentence.

    Args:
        detail: What is wrong and what to do, for the client; quotes nothing of the body but names.
        status: HTTP status.
        reason: Key under which such answers are counted.
        retry_after: Seconds after which it may be tried again; None: it would fail again.
    """

    def __init__(
        self, detail: str, *, status: int = 422, reason: str, retry_after: int | None = None
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.status = status
        self.reason = reason
        self.retry_after = retry_after


def malformed(path: str, problem: str) -> RefusedRequestError:
    """Return the answer to a body with a problem at a path such as ``prompts[2]``."""
    return RefusedRequestError(f"{path}: {problem}", reason="malformed")


class Body:
    """The body of a request, part by part; `Request.body` must not be used as well."""

    def __init__(self, request: Request) -> None:
        self._receive: Receive = request.receive
        self._declared = request.headers.get("content-length", "")
        self._ended = False

    async def read(self, limit: int, weigh: Callable[[int], object] = lambda _: None) -> bytearray:
        """Read all of it, unless it has more bytes than ``limit`` or declares so.

        After each part ``weigh`` receives the number of bytes so far.
        """
        # compared as text first: a number of any length is slow to read
        declared = self._declared if self._declared.isdecimal() else "0"
        content = bytearray()
        too_large = len(declared) >= 20 or int(declared) > limit
        while not too_large and not self._ended:
            content += await self._part()
            weigh(len(content))
            too_large = len(content) > limit
        if too_large:
            raise RefusedRequestError(
                f"the body has more than {limit / 1e6:g} MB, the most that this service "
                "takes in one request: send less at once",
                status=413,
                reason="too large",
            )
        return content

    async def discard(self) -> None:
        """Read on for a while without storing anything.

        A client that is still sending would find its connection broken, and not the answer.
        """
        received = 0
        # a client that sends no end gets the answer, or the broken connection, at last
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(_DISCARD_SECONDS):
                while not self._ended and received < _DISCARD_BYTES:
                    received += len(await self._part())

    async def _part(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._ended = True
            raise ClientDisconnect
        self._ended = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part


def check_headers(request: Request) -> None:
    """Refuse what is not declared as plain JSON, such as the form of a foreign web page."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    coding = request.headers.get("content-encoding", "identity")
    if kind.lower() != "application/json" or coding.lower() != "identity":
        raise RefusedRequestError(
            "the content type must be application/json, and the content not compressed",
            status=415,
            reason="content type",
        )


def parse_json(content: bytes | bytearray, max_values: int) -> Any:
    """Parse a body, and refuse what is no JSON in UTF-8, has too many values or is too deep.

    NaN, infinite numbers and lone halves of surrogate pairs are refused too. Nothing else runs
    while JSON is parsed, and an empty list in two letters takes sixty bytes: values are counted
    first.
    """
    if holds_more_values(content, max_values):
        raise RefusedRequestError(
            f"the body has more than {max_values} values, the most that this service takes in one "
            "request: send less at once",
            status=413,
            reason="too many values",
        )
    try:
        # its messages quote nothing of the body, and no text is cached for the next one
        value = from_json(content, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise malformed("body", f"it is no JSON: {error}") from error
    if _holds_infinity(value):
        raise malformed("body", "it holds a number that is too large for a float")
    return value


def holds_more_values(content: bytes | bytearray, most: int) -> bool:
    """Return whether JSON has more commas and opening brackets outside of texts than this.

    Every step is one pass in C over all of it.
    """
    without_escaped = content.replace(rb"\\", b"").replace(rb"\"", b"")
    if without_escaped.count(b'"') > 4 * (most + 1):  # a text has two, and a value may have a name
        return True
    outside = b"".join(without_escaped.split(b'"')[::2])
    return sum(outside.count(mark) for mark in (b",", b"[", b"{")) > most


def _holds_infinity(value: Any) -> bool:
    if isinstance(value, float):
        return math.isinf(value)
    if isinstance(value, dict):
        return any(map(_holds_infinity, value.values()))
    return isinstance(value, list) and any(map(_holds_infinity, value))


_counts: Counter[tuple[str, str]] = Counter()


def log_defect(what: str, error: Exception) -> None:
    """Log where an error was raised, and not its message, which may quote what was sent.

    The same error at the same line is logged once, and then by its number: 10, 100, ....
    """
    trace = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    key = (type(error).__name__, trace)
    _counts[key] += 1
    number = str(_counts[key])
    if number == "1":
        logger.error("%s %s:\n%s", what, type(error).__name__, trace)
    elif number.strip("0") == "1":
        logger.error("%s %s, as before: %s times by now", what, type(error).__name__, number)
