"""The body of a request: read no further than allowed, and parsed as strict JSON."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

_DISCARD_BYTES = 64_000_000
_DISCARD_SECONDS = 5.0


class RefusedRequestError(ValueError):
    """A request that is answered with a status of its own and one sentence.

    Args:
        detail: What is wrong and what to do, for the client; quotes nothing of the body but names.
        status: HTTP status.
        reason: A word or two that such answers are counted by.
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


def malformed(place: str, what: str) -> RefusedRequestError:
    """Return the answer to a body with something wrong at a place such as ``prompts[2]``."""
    return RefusedRequestError(f"{place}: {what}", reason="malformed")


class Body:
    """What a client sends, part by part; the request's own way to read is not used beside it."""

    def __init__(self, request: Request) -> None:
        self._receive: Receive = request.receive
        self._declared = request.headers.get("content-length", "")
        self._ended = False

    async def read(self, limit: int, weigh: Callable[[int], object] = lambda _: None) -> bytearray:
        """Read all of it, unless there are more bytes, or will be by the client's own account.

        After each part ``weigh`` is told how many have come.
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
        """Read on for a while without keeping anything.

        A client that is still sending would find its connection broken, and not the answer.
        """
        taken = 0
        # a client that sends no end gets the answer, or the broken connection, at last
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(_DISCARD_SECONDS):
                while not self._ended and taken < _DISCARD_BYTES:
                    taken += len(await self._part())

    async def _part(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._ended = True
            raise ClientDisconnect
        self._ended = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part


def check_headers(request: Request) -> None:
    """Refuse what is no plain JSON by its own account, such as the form of a foreign web page."""
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

    So are NaN, infinite numbers and lone halves of surrogate pairs. Nothing else runs while JSON is
    parsed, and an empty list in two letters takes sixty bytes: values are counted before.
    """
    if holds_more_values(content, max_values):
        raise RefusedRequestError(
            f"the body has more than {max_values} values, the most that this service takes in one "
            "request: send less at once",
            status=413,
            reason="too many values",
        )
    try:
        # its sentences quote nothing of the body, and no text is kept for the next one
        value = from_json(content, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise malformed("body", f"it is no JSON: {error}") from error
    if _holds_infinity(value):
        raise malformed("body", "it holds a number that is too large for a float")
    return value


def holds_more_values(content: bytes | bytearray, most: int) -> bool:
    """Tell whether JSON has more commas and opening brackets outside of texts than this.

    Every step is one pass in C over the whole.
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
