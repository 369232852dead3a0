"""One exchange with a reward service: limited in time and size, and told in words."""

from __future__ import annotations

import asyncio
import email.utils
import functools
import ipaddress
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from lrlhf.rewards.function import RewardError

_SHOWN = 300
_TRANSIENT = (408, 425, 429)
_BUSY = (429, 503)
_DOWN = (*_TRANSIENT, 502, 503, 504)
"""What a service that is not itself, or what stands in front of it, answers; not 500, which may be
about the request and come back for ever."""
_BUSY_S = 1.0
"""How long a service is left alone that has too many requests and does not say until when."""
_ADVICE = {
    401: "set the token that the service wants, with token_env or token_file",
    403: "the token is known and does not suffice",
    404: "check the address and the protocol",
    413: "send less at once with a lower batch_size, or raise the service's limits",
}


class ServiceError(Exception):
    """A request that failed in a way that another attempt may mend.

    Args:
        reason: What went wrong.
        wait: Seconds for which the service asked to be left alone; None: it did not ask.
        answered: There was a reply, whatever it said.
        down: The service is unreachable or not in a state to answer anyone.
    """

    def __init__(
        self, reason: str, *, wait: float | None = None, answered: bool = True, down: bool = False
    ) -> None:
        super().__init__(reason)
        self.wait = wait
        self.answered = answered
        self.down = down


@dataclass(frozen=True)
class Exchange:
    """How requests are sent: whom with, how long, how much."""

    client: httpx.AsyncClient
    timeout: float
    """Seconds for a request as a whole, so that a reply that drips in is not waited for."""
    max_bytes: int
    token: str | None = field(repr=False)

    async def get(self, url: str) -> Any:
        """Return what the service replies to a GET, see `post`."""
        return await self._json("GET", url, None)

    async def post(self, url: str, body: bytes) -> Any:
        """Send JSON and return the JSON that comes back.

        Raises:
            ServiceError: It may work later, or elsewhere: no connection, no reply in time, a busy
                or broken service, a reply that is no JSON.
            RewardError: The service refuses such requests for good.
        """
        return await self._json("POST", url, body)

    async def _json(self, method: str, url: str, body: bytes | None) -> Any:
        try:
            async with asyncio.timeout(self.timeout):
                response, content = await self._read(method, url, body)
        except TimeoutError:
            reason = f"no reply within {self.timeout:g} s"
            raise ServiceError(reason, answered=False, down=True) from None
        except httpx.TransportError as error:
            reason = self._shown(f"{type(error).__name__}: {error}")
            raise ServiceError(reason, answered=False, down=True) from None
        if response.status_code != httpx.codes.OK:
            raise self._refusal(url, response, content)
        return read_json(content)

    async def _read(
        self, method: str, url: str, body: bytes | None
    ) -> tuple[httpx.Response, bytes]:
        """Read a reply until it is complete or too long; none of it is decompressed."""
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        async with self.client.stream(method, url, content=body, headers=headers) as response:
            content = bytearray()
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > self.max_bytes:
                    raise ServiceError(f"the reply is longer than {self.max_bytes} bytes")
        return response, bytes(content)

    def _refusal(self, url: str, response: httpx.Response, content: bytes) -> Exception:
        status = response.status_code
        reason = f"HTTP {status}{self._said(content)}"
        if 300 <= status < 400:
            target = self._shown(response.headers.get("location", "nowhere"))
            return ServiceError(f"HTTP {status}, a redirect to {target}, which is not followed")
        if status >= 500 or status in _TRANSIENT:
            return ServiceError(reason, wait=_asked_wait(response), down=status in _DOWN)
        advice = f"; {_ADVICE[status]}" if status in _ADVICE else ""
        return RewardError(f"the reward service {url} refuses the request: {reason}{advice}")

    def _said(self, content: bytes) -> str:
        """Return the service's own sentence, if there is one."""
        try:
            reply = read_json(content)
        except ServiceError:
            return ""
        detail = reply.get("detail") if isinstance(reply, dict) else None
        if detail is None:
            return ""
        return f": {self._shown(detail if isinstance(detail, str) else json.dumps(detail))}"

    def _shown(self, text: str) -> str:
        """Make foreign text fit for a log: in one line, short, and without the token."""
        if self.token:
            text = text.replace(self.token, "***")
        text = "".join(letter if letter.isprintable() else " " for letter in text)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def read_json(content: bytes) -> Any:
    """Read JSON that may be anything.

    Raises:
        ServiceError: It is none; NaN and Infinity are none.
    """
    try:
        return json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        shown = repr(content[:40])
        raise ServiceError(f"the reply is no JSON ({error}); it begins with {shown}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _asked_wait(response: httpx.Response) -> float | None:
    """Return the seconds that a busy service asks for, None if it is not just busy."""
    if response.status_code not in _BUSY:
        return None
    wait = _retry_after(response.headers)
    return _BUSY_S if wait is None and response.status_code == 429 else wait


def _retry_after(headers: httpx.Headers) -> float | None:
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdecimal():
        return float(value)
    # a date is compared with the service's own clock: this machine's may be wrong
    dates = (value, headers.get("date", ""))
    try:
        until, now = (email.utils.parsedate_to_datetime(date) for date in dates)
        return max(0.0, (until - now).total_seconds())
    except (ValueError, TypeError):
        return None


def checked_url(url: str) -> str:
    """Return the address of a service without a slash at its end.

    Raises:
        ValueError: It is no http or https address, or holds a password or a query.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"urls: {url!r} is no address: {error}") from error
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise ValueError(
            f"urls: the address of {parsed.host or 'a service'} holds more than host, port and "
            "path; a token belongs into the environment variable that token_env names"
        )
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"urls: {url!r} is no http address such as http://127.0.0.1:8100")
    return str(parsed).rstrip("/")


def is_plain_and_remote(url: str) -> bool:
    """Tell whether what is sent to an address can be read on the way."""
    parsed = httpx.URL(url)
    if parsed.scheme == "https" or parsed.host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(parsed.host).is_loopback
    except ValueError:
        return True


def new_client(verify: bool | str, max_connections: int) -> httpx.AsyncClient:
    """Open a pool of connections that follows no redirect and uses no proxy.

    Args:
        verify: Check certificates; a path: against the authorities in this file.
        max_connections: At a time.
    """
    context = verify if verify is False else _authorities(verify)
    return httpx.AsyncClient(
        verify=context,
        trust_env=False,
        timeout=None,  # every request has its own, see Exchange
        limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=None),
    )


@functools.cache
def _authorities(verify: bool | str) -> ssl.SSLContext:
    """Read certificates, which takes longer than a request."""
    if isinstance(verify, bool):
        return httpx.create_ssl_context(trust_env=False)
    try:
        return ssl.create_default_context(cafile=verify)
    except OSError as error:
        raise ValueError(f"verify: {verify!r} holds no certificates: {error}") from error


def object_of(reply: Any) -> Mapping[str, Any]:
    """Return a reply that must be a JSON object.

    Raises:
        ServiceError: It is something else.
    """
    if not isinstance(reply, dict):
        raise ServiceError(f"the reply is a JSON {type(reply).__name__}, not an object")
    return reply
