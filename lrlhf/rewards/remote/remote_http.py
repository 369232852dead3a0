"""One exchange with a reward service: limited in time and size, and told in words."""

from __future__ import annotations

import asyncio
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
_MAX_BYTES = 16 * 10**6
"""Of a reply; a score takes twenty."""
_TRANSIENT = (408, 425, 429)
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


class RequestRefusedError(RewardError):
    """A service refuses a request for good.

    Args:
        message: What it said.
        status: Of HTTP.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Exchange:
    """How requests are sent: whom with, and how long."""

    client: httpx.AsyncClient
    timeout: float
    """Seconds for a request as a whole, so that a reply that drips in is not waited for."""
    token: str | None = field(repr=False)

    async def ask(self, url: str, body: bytes | None = None) -> Mapping[str, Any]:
        """Send JSON, or without a body a GET, and return the JSON object that comes back.

        Raises:
            ServiceError: It may work later, or elsewhere: no connection, no reply in time, a busy
                or broken service, a reply that is no JSON object.
            RequestRefusedError: The service refuses such requests for good.
        """
        try:
            async with asyncio.timeout(self.timeout):
                response, content = await self._read(url, body)
        except TimeoutError:
            reason = f"no reply within {self.timeout:g} s"
            raise ServiceError(reason, answered=False, down=True) from None
        except httpx.TransportError as error:
            reason = self._shown(f"{type(error).__name__}: {error}")
            raise ServiceError(reason, answered=False, down=True) from None
        if response.status_code != httpx.codes.OK:
            raise self._refusal(url, response, content)
        try:
            reply = json.loads(content)
        except (ValueError, RecursionError) as error:
            shown = repr(content[:40])
            raise ServiceError(f"the reply is no JSON ({error}); it begins with {shown}") from None
        if not isinstance(reply, dict):
            raise ServiceError(f"the reply is a JSON {type(reply).__name__}, not an object")
        return reply

    async def _read(self, url: str, body: bytes | None) -> tuple[httpx.Response, bytes]:
        """Read a reply until it is complete or too long; none of it is decompressed."""
        method = "GET" if body is None else "POST"
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        async with self.client.stream(method, url, content=body, headers=headers) as response:
            content = bytearray()
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > _MAX_BYTES:
                    raise ServiceError(f"the reply is longer than {_MAX_BYTES} bytes")
        return response, bytes(content)

    def _refusal(self, url: str, response: httpx.Response, content: bytes) -> Exception:
        status = response.status_code
        if 300 <= status < 400:
            target = self._shown(response.headers.get("location", "nowhere"))
            return ServiceError(f"HTTP {status}, a redirect to {target}, which is not followed")
        reason = f"HTTP {status}{self._said(content)}"
        if status >= 500 or status in _TRANSIENT:
            asked = response.headers.get("retry-after", "").strip()
            wait = _BUSY_S if status == 429 else None
            if status in (429, 503) and asked.isascii() and asked.isdecimal():
                wait = float(asked)
            return ServiceError(reason, wait=wait, down=status in _DOWN)
        advice = f"; {_ADVICE[status]}" if status in _ADVICE else ""
        message = f"the reward service {url} refuses the request: {reason}{advice}"
        return RequestRefusedError(message, status)

    def _said(self, content: bytes) -> str:
        """Return the service's own sentence, if there is one."""
        try:
            reply = json.loads(content)
        except (ValueError, RecursionError):
            return ""
        # the second is OpenAI's
        kinds = (reply.get("detail"), reply.get("error")) if isinstance(reply, dict) else ()
        detail = next((kind for kind in kinds if kind is not None), None)
        if isinstance(detail, dict) and isinstance(detail.get("message"), str):
            detail = detail["message"]
        if detail is None:
            return ""
        return f": {self._shown(detail if isinstance(detail, str) else json.dumps(detail))}"

    def _shown(self, text: str) -> str:
        """Make foreign text fit for a log: in one line, short, and without the token."""
        if self.token:
            text = text.replace(self.token, "***")
        return one_line(text, _SHOWN)


def one_line(text: str, most: int) -> str:
    """Return what a service said, with nothing that a terminal would act on."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= most else f"{text[:most]}..."


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
    """Open a pool of connections that follows no redirect and uses no proxy."""
    return httpx.AsyncClient(
        verify=verify is not False and _authorities(verify),
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
