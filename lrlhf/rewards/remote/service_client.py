"""The client of all rewards that HTTP services compute.

A `ServiceClient` has one or several services with the same model. Each call of the reward opens
`Calls`, which send a request to the least busy `Service`, repeat it elsewhere after a growing pause
if it fails, and leave a service alone that fails again and again. `Exchange` is one HTTP request,
limited in time and size.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import itertools
import json
import logging
import math
import os
import random
import re
import ssl
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import httpx

from lrlhf.background import EventLoop
from lrlhf.rewards.function import (
    CopiesStartAfresh,
    LogMetric,
    PartialValues,
    RewardError,
    check_positive,
)

logger = logging.getLogger(__name__)

ReadT = TypeVar("ReadT")
PartT = TypeVar("PartT")

DEFAULT_TOKEN_ENV = "LRLHF_REWARD_TOKEN"
_TOKEN = re.compile(r"[!-~]+")
_POLL_S = 0.5
_FIRST_PAUSE_S = 0.5
"""Before the first repetition, doubled with every further one."""
_LONGEST_PAUSE_S = 15.0
_LEAST_PAUSE_S = 0.05
_OUTAGE_LOG_S = 60.0
"""Between two lines that report that the run waits."""
_BREAKER_FAILURES = 5
_COOLDOWN_S = 10.0
_BUSY_S = 1.0
"""Pause for a service that has too many requests and does not report until when."""
_LONGEST_BUSY_S = 30.0
_JITTER = random.Random()
"""Of its own: the state of the global one belongs to the run, and a resumed run repeats it."""
_MAX_MESSAGE = 300
_MAX_BYTES = 16 * 10**6
"""Of a reply; a score takes twenty."""
_TRANSIENT = (408, 425, 429)
_DOWN = (*_TRANSIENT, 502, 503, 504)
"""Statuses of a service that cannot serve anyone, or of what stands in front of it; not 500, which
may be about the request and come back for ever."""
_ADVICE = {
    401: "set the token that the service requires, with token_env or token_file",
    403: "the token is known and does not suffice",
    404: "check the address and the protocol",
    413: "send less at once with a lower batch_size, or raise the service's limits",
}
_WARNED: set[str] = set()
"""Addresses to which a token goes unencrypted, and that were warned of."""


class ServiceError(Exception):
    """A request that failed in a way that another attempt may mend.

    Args:
        reason: What went wrong.
        wait: Pause in seconds that the service requested; None: none.
        answered: There was a reply, whatever its content.
        down: The service is unreachable or cannot serve anyone.
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
        message: Its reason.
        status: Of HTTP.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServicesDownError(RuntimeError):
    """No reward service answered."""


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Addresses of services, and limits and retries of the requests; see `ServiceReward`.

    Raises:
        ValueError: One is out of its range.
    """

    urls: str | list[str]
    token_env: str
    token_file: str | None
    timeout: float
    total_timeout: float | None
    retries: int
    max_concurrency: int
    startup_timeout: float
    max_wait: float | None
    verify: bool | str

    def __post_init__(self) -> None:
        if not self.addresses or len(set(self.addresses)) < len(self.addresses):
            raise ValueError(f"urls must name at least one service, each once, and is {self.urls}")
        if self.verify == "":
            raise ValueError("verify is empty; give true, false, or a path to authorities")
        check_positive(
            timeout=self.timeout,
            total_timeout=self.total_timeout,
            max_concurrency=self.max_concurrency,
            startup_timeout=self.startup_timeout,
        )
        if self.retries < 0:
            raise ValueError(f"retries is {self.retries}; it must be 0 or more")
        if self.max_wait is not None and not self.max_wait >= 0:
            raise ValueError(
                f"max_wait is {self.max_wait}; it must be 0 or more, or null for no limit"
            )

    @property
    def addresses(self) -> list[str]:
        """Of the services, without a slash at the end."""
        urls = [self.urls] if isinstance(self.urls, str) else self.urls
        return [_checked_url(url) for url in urls]

    @property
    def longest_outage(self) -> float:
        """Seconds; infinite: there is no limit."""
        return math.inf if self.max_wait is None else self.max_wait

    @contextlib.asynccontextmanager
    async def connections(self) -> AsyncIterator[Exchange]:
        """Open a pool of connections that follows no redirect and uses no proxy.

        The token is kept nowhere but in the connections.

        Raises:
            RewardError: The token cannot be read.
        """
        try:
            token = read_token(self.token_env, self.token_file)
        except ValueError as error:
            raise RewardError(str(error)) from None
        for url in self.addresses:
            if token is not None and url not in _WARNED and _is_plain_and_remote(url):
                _WARNED.add(url)
                logger.warning(
                    "the token for the reward service %s can be read on its way there: the "
                    "address is not https",
                    url,
                )
        async with httpx.AsyncClient(
            verify=self.verify is not False and _authorities(self.verify),
            trust_env=False,
            timeout=None,  # every request has its own, see Exchange
            limits=httpx.Limits(
                max_connections=self.max_concurrency, max_keepalive_connections=None
            ),
        ) as client:
            yield Exchange(client, self.timeout, token)


def read_token(token_env: str, token_file: str | None) -> str | None:
    """Read the token that clients send and services require.

    Args:
        token_env: Environment variable that holds it.
        token_file: File that holds it, instead.

    Returns:
        None: there is none.

    Raises:
        ValueError: A file or a variable was named that is not there, or what it holds is no token.
    """
    token = os.environ.get(token_env)
    source = f"token_env {token_env!r}"
    if token_file is not None:
        source = f"token_file {token_file!r}"
        try:
            token = Path(token_file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{source} cannot be read: {type(error).__name__}") from error
    if token is None:
        if token_env != DEFAULT_TOKEN_ENV:
            raise ValueError(f"token_env is {token_env!r}, and there is no such variable: set it")
        return None
    token = token.strip()
    if not _TOKEN.fullmatch(token):  # the token itself must not show up in a message
        raise ValueError(
            f"{source}: a token is one line of letters, digits and signs without spaces; write a "
            "new one, such as `openssl rand -hex 32` prints"
        )
    return token


class ServiceClient:
    """The services of one reward, and the state of each.

    Args:
        settings: Of the services and the requests.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self.services = Services(settings.addresses)

    def wait_until_ready(self, probe: Callable[[Exchange, Service], Awaitable[str]]) -> None:
        """Wait until a service answers, and compare the models of all that do.

        Args:
            probe: Sends a service a first request, and returns what is wrong with it; empty:
                nothing.

        Raises:
            RewardError: None answers within ``startup_timeout``, or they have different models.
        """
        loop = EventLoop("reward-services")  # a notebook's own loop runs already
        loop.submit(self._wait_until_ready(probe)).result()

    async def _wait_until_ready(self, probe: Callable[[Exchange, Service], Awaitable[str]]) -> None:
        limit = self._settings.startup_timeout
        deadline = time.monotonic() + limit
        async with self._settings.connections() as exchange:
            while True:
                results = await asyncio.gather(
                    *(probe(exchange, service) for service in self.services)
                )
                problems = [problem for problem in results if problem]
                if len(problems) < len(self.services):
                    break
                if time.monotonic() >= deadline:
                    raise RewardError(
                        f"no reward service answers within startup_timeout = {limit:g} s: "
                        f"{'; '.join(problems)}"
                    )
                await asyncio.sleep(_POLL_S)
        for problem in problems:
            logger.warning("a reward service does not answer, and the others do: %s", problem)
        self.services.check_versions()

    @contextlib.asynccontextmanager
    async def calls(self) -> AsyncIterator[Calls]:
        """Open connections for the requests of one call of the reward."""
        settings = self._settings
        limit = math.inf if settings.total_timeout is None else settings.total_timeout
        deadline = asyncio.get_running_loop().time() + limit + settings.longest_outage
        async with settings.connections() as exchange:
            yield Calls(
                self.services, settings, exchange, deadline if math.isfinite(deadline) else None
            )

    async def scores(
        self,
        parts: Sequence[tuple[PartT, int]],
        score: Callable[[Calls, PartT], Coroutine[Any, Any, Sequence[float | None] | None]],
        log_metric: LogMetric,
        *,
        name: str,
    ) -> list[float | None]:
        """Score all parts of a batch concurrently.

        Args:
            parts: Each with the number of its responses.
            score: Returns the scores of a part; None: no service returned any.
            log_metric: Receives latencies, retries and failures.
            name: Prefix of these metrics.

        Returns:
            One score per response, in order; `PartialValues` where a part has none.

        Raises:
            ServicesDownError: No part has any.
        """
        async with self.calls() as calls:
            results = await gather([score(calls, part) for part, _ in parts])
        for seconds in calls.latencies:
            log_metric(f"{name}/latency_s", seconds)
        scores: list[float | None] = []
        failed = 0
        for (_, size), result in zip(parts, results, strict=True):
            scores += [math.nan] * size if result is None else result
            failed += size if result is None else 0
        log_metric(f"{name}/retries", calls.retries)
        log_metric(f"{name}/failures", failed)
        if not failed:
            return scores
        failure = (
            f"no reward service scored {failed} of {len(scores)} responses: "
            f"{self.services.last_errors()}"
        )
        if failed == len(scores):
            raise ServicesDownError(failure)
        return PartialValues(scores, failure)


class ServiceReward(CopiesStartAfresh):
    """Base of the rewards that services compute; its options are those of the requests.

    Args:
        urls: Address of the service, or a list of addresses, such as ``http://127.0.0.1:8100``.
        token_env: Environment variable that holds the token that the services require; without
            it, none is sent.
        token_file: File that holds the token, instead.
        timeout: Seconds for one request.
        total_timeout: Seconds for all requests of one call together; what was scored by then
            counts. null: no limit.
        retries: How often a request is sent again after a failure. A busy service is left alone
            for the time that it requests, at most 30 s.
        max_concurrency: Requests under way at a time, over all services.
        startup_timeout: Seconds that a service may take to come up when the run starts.
        max_wait: Seconds that an outage may last in mid-run: while no service can be reached or is
            ready (HTTP 408, 425, 429, 502 to 504), requests are repeated, on top of
            ``total_timeout``, and a warning is logged every minute. null: no limit. The deadline
            of the phase ``reward`` (`Deadlines`), and the ``timeout`` of `Rewards`, if it is set,
            end the wait too.
        verify: Check the certificates of https addresses; a path: against the authorities in it.
    """

    ends_by_itself: ClassVar[bool] = True
    none_is_missing: ClassVar[bool] = True

    def __init__(  # noqa: PLR0913  the keys of a user's config
        self,
        urls: str | list[str],
        *,
        token_env: str = DEFAULT_TOKEN_ENV,
        token_file: str | None = None,
        timeout: float = 120.0,
        total_timeout: float | None = 1800.0,
        retries: int = 4,
        max_concurrency: int = 8,
        startup_timeout: float = 60.0,
        max_wait: float | None = 0.0,
        verify: bool | str = True,
    ) -> None:
        self._settings = ServiceSettings(
            urls=urls,
            token_env=token_env,
            token_file=token_file,
            timeout=timeout,
            total_timeout=total_timeout,
            retries=retries,
            max_concurrency=max_concurrency,
            startup_timeout=startup_timeout,
            max_wait=max_wait,
            verify=verify,
        )

    def _start_afresh(self) -> None:
        self._client = ServiceClient(self._settings)


class Calls:
    """The requests of one call of a reward.

    Args:
        services: That may answer.
        settings: Limits and retries.
        exchange: Open connections.
        deadline: On the clock of the event loop; None: there is none.
    """

    def __init__(
        self,
        services: Services,
        settings: ServiceSettings,
        exchange: Exchange,
        deadline: float | None,
    ) -> None:
        self._services = services
        self._settings = settings
        self._exchange = exchange
        self._deadline = deadline
        self._slots = asyncio.Semaphore(settings.max_concurrency)
        self.retries = 0
        self.latencies: list[float] = []
        """Seconds of each request that was answered."""
        self._down_since: float | None = None
        """Since when the retries are used up and nothing was answered, on the same clock."""
        self._next_log = -math.inf

    async def send(
        self,
        address: Callable[[str], str],
        encode: Callable[[], bytes],
        read: Callable[[Mapping[str, Any]], ReadT],
    ) -> ReadT | None:
        """Send a request until a service answers it.

        Args:
            address: Returns where it goes, from the configured address of a service.
            encode: Returns the request as JSON.
            read: Reads the reply; a `ServiceError` has the request sent again.

        Returns:
            What was read; None: no service answered, see `Services.last_errors`.
        """
        try:
            async with asyncio.timeout_at(self._deadline), self._slots:
                # images take their time, and the loop has others to serve
                body = await asyncio.to_thread(encode)
                return await self._send(address, body, read)
        except (ServiceError, TimeoutError):
            return None

    async def _send(
        self,
        address: Callable[[str], str],
        body: bytes,
        read: Callable[[Mapping[str, Any]], ReadT],
    ) -> ReadT:
        tried: set[Service] = set()
        failures = rounds = 0
        while True:
            service = await self._services.next(tried)
            started = time.monotonic()
            try:
                with service.request():
                    reply = await self._exchange.send(address(service.url), body)
                    result = read(reply)
            except ServiceError as error:
                if error.wait is None:
                    failures += 1
                    tried.add(service)
                if failures > self._settings.retries and not (error.down and self._waits()):
                    raise
            else:
                service.note_version(reply)
                self.latencies.append(time.monotonic() - started)
                self._down_since = None
                return result
            self.retries += 1
            if len(tried) == len(self._services):
                tried.clear()
                rounds += 1
                pause = _FIRST_PAUSE_S * 2 ** min(rounds - 1, 30)
                await asyncio.sleep(_with_jitter(min(_LONGEST_PAUSE_S, pause)))

    def _waits(self) -> bool:
        """Whether an outage is waited for; log it now and then."""
        now, longest = asyncio.get_running_loop().time(), self._settings.longest_outage
        if self._down_since is None:
            self._down_since = now
        elapsed = now - self._down_since
        if elapsed >= longest:
            return False
        if now >= self._next_log:
            self._next_log = now + _OUTAGE_LOG_S
            logger.warning(
                "no reward service has answered for %.0f s, and the run waits for them "
                "(max_wait: %g s): %s",
                elapsed,
                longest,
                self._services.last_errors(),
            )
        return True


async def gather(coroutines: Sequence[Coroutine[Any, Any, ReadT]]) -> list[ReadT]:
    """Run all; the first that fails ends the others, and its error is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as errors:  # the first one suffices, and has its own type
        raise errors.exceptions[0] from None
    return [task.result() for task in running]


class Service:
    """One address with a circuit breaker.

    After five failures in a row it is left alone for ten seconds; then a single request finds out
    whether it is back.

    Args:
        url: Without a slash at its end.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.in_flight = 0
        self.last_error = ""
        self.version = ""
        """Model and version as last reported; empty: unknown."""
        self._failures = 0
        self._free_at = -math.inf
        self._probing = False

    def ready_in(self) -> float:
        """Return the seconds until it may be sent requests; infinite while one request tries it."""
        return math.inf if self._probing else max(0.0, self._free_at - time.monotonic())

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count what happens inside as one request to the service."""
        probe = self._failures >= _BREAKER_FAILURES
        self._probing = probe
        self.in_flight += 1
        try:
            yield
        except ServiceError as error:
            self._note_failure(error)
            raise
        else:
            if self._failures >= _BREAKER_FAILURES:
                self._free_at = -math.inf
                logger.warning("the reward service %s answers again", self.url)
            self._failures = 0
        finally:
            self.in_flight -= 1
            if probe:
                self._probing = False

    def note_version(self, reply: Mapping[str, Any]) -> None:
        """Note which model the service reports, and warn if that changes."""
        parts = [reply.get(key) for key in ("model", "version")]
        version = " ".join(_one_line(part, 100) for part in parts if isinstance(part, str))
        if not version or version == self.version:
            return
        if self.version:
            logger.warning(
                "the reward service %s has another model than before: %s instead of %s. Scores "
                "from now on cannot be compared with earlier ones",
                self.url,
                version,
                self.version,
            )
        else:
            logger.info("the reward service %s has the model %s", self.url, version)
        self.version = version

    def _note_failure(self, error: ServiceError) -> None:
        self.last_error = str(error)
        if error.wait is not None:  # busy, which is no failure
            wait = min(max(error.wait, _LEAST_PAUSE_S), _LONGEST_BUSY_S)
            self._free_at = time.monotonic() + wait
            return
        self._failures += 1
        if self._failures < _BREAKER_FAILURES:
            return
        self._free_at = time.monotonic() + _COOLDOWN_S
        if self._failures == _BREAKER_FAILURES:
            logger.warning(
                "the reward service %s failed %d times in a row and is left alone for %g s at a "
                "time until it answers: %s",
                self.url,
                self._failures,
                _COOLDOWN_S,
                error,
            )


class Services(list[Service]):
    """All addresses that return the same scores; at least one."""

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__(Service(url) for url in urls)
        self._turn = itertools.count()

    async def next(self, tried: set[Service]) -> Service:
        """Wait for a service that may be sent a request, and return the least busy one.

        Those that were tried are returned only if no other one is ready.
        """
        while not (ready := [service for service in self if not service.ready_in()]):
            wait = min(service.ready_in() for service in self)
            # an infinite wait ends with the request that tries the service
            await asyncio.sleep(_with_jitter(wait if math.isfinite(wait) else _LEAST_PAUSE_S))
        fresh = [service for service in ready if service not in tried] or ready
        turn = next(self._turn) % len(fresh)
        return min(fresh[turn:] + fresh[:turn], key=lambda service: service.in_flight)

    def check_versions(self) -> None:
        """Compare the models that the services have reported.

        Raises:
            RewardError: They differ.
        """
        versions = {service.version: service.url for service in self if service.version}
        if len(versions) > 1:
            models = "; ".join(f"{url} has {version}" for version, url in versions.items())
            raise RewardError(
                f"the reward services have different models, so that scores would depend on who "
                f"answers: {models}. Serve the same one everywhere, or make each a reward of its "
                "own"
            )

    def last_errors(self) -> str:
        return "; ".join(
            f"{service.url}: {service.last_error or 'no request reached it in time'}"
            for service in self
        )


def _with_jitter(seconds: float) -> float:
    """Prolong a pause by up to a quarter, so that not all who wait come back at once."""
    return max(_LEAST_PAUSE_S, seconds) * _JITTER.uniform(1.0, 1.25)


@dataclass(frozen=True)
class Exchange:
    """Open connections, with the limit of a request."""

    client: httpx.AsyncClient
    timeout: float
    """Seconds for a complete request, so that a reply that drips in is not waited for."""
    token: str | None = field(repr=False)

    async def send(self, url: str, body: bytes | None = None) -> Mapping[str, Any]:
        """Send JSON, or without a body a GET, and return the JSON object of the reply.

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
            reason = self._for_log(f"{type(error).__name__}: {error}")
            raise ServiceError(reason, answered=False, down=True) from None
        if response.status_code != httpx.codes.OK:
            raise self._refusal(url, response, content)
        try:
            reply = json.loads(content)
        except (ValueError, RecursionError) as error:
            start = repr(content[:40])
            raise ServiceError(f"the reply is no JSON ({error}); it begins with {start}") from None
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
            target = self._for_log(response.headers.get("location", "nowhere"))
            return ServiceError(f"HTTP {status}, a redirect to {target}, which is not followed")
        reason = f"HTTP {status}{self._detail(content)}"
        if status >= 500 or status in _TRANSIENT:
            requested = response.headers.get("retry-after", "").strip()
            wait = _BUSY_S if status == 429 else None
            if status in (429, 503) and requested.isascii() and requested.isdecimal():
                wait = float(requested)
            return ServiceError(reason, wait=wait, down=status in _DOWN)
        advice = f"; {_ADVICE[status]}" if status in _ADVICE else ""
        message = f"the reward service {url} refuses the request: {reason}{advice}"
        return RequestRefusedError(message, status)

    def _detail(self, content: bytes) -> str:
        """Return the service's own message, if there is one."""
        try:
            reply = json.loads(content)
        except (ValueError, RecursionError):
            return ""
        # the second is OpenAI's
        fields = (reply.get("detail"), reply.get("error")) if isinstance(reply, dict) else ()
        detail = next((value for value in fields if value is not None), None)
        if isinstance(detail, dict) and isinstance(detail.get("message"), str):
            detail = detail["message"]
        if detail is None:
            return ""
        return f": {self._for_log(detail if isinstance(detail, str) else json.dumps(detail))}"

    def _for_log(self, text: str) -> str:
        """Make foreign text fit for a log: in one line, short, and without the token."""
        if self.token:
            text = text.replace(self.token, "***")
        return _one_line(text, _MAX_MESSAGE)


def _one_line(text: str, longest: int) -> str:
    """Return a text of a service, with nothing that a terminal would act on."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= longest else f"{text[:longest]}..."


def _checked_url(url: str) -> str:
    """Return an address without a slash at its end.

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


def _is_plain_and_remote(url: str) -> bool:
    """Whether what is sent to an address can be read on the way."""
    parsed = httpx.URL(url)
    if parsed.scheme == "https" or parsed.host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(parsed.host).is_loopback
    except ValueError:
        return True


@functools.cache
def _authorities(verify: bool | str) -> ssl.SSLContext:
    """Read certificates, which takes longer than a request."""
    if isinstance(verify, bool):
        return httpx.create_ssl_context(trust_env=False)
    try:
        return ssl.create_default_context(cafile=verify)
    except OSError as error:
        raise ValueError(f"verify: {verify!r} holds no certificates: {error}") from error


def read_models(reply: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the models in a reply of OpenAI's ``/models``, by name.

    Raises:
        ServiceError: It is no list of models.
    """
    try:
        return {str(entry["id"]): {**entry} for entry in reply["data"]}
    except (LookupError, TypeError) as error:
        raise ServiceError("the reply is no list of models") from error


def served_model(url: str, models: Mapping[str, Any], name: str | None) -> str:
    """Return the name of the model to send requests to.

    Args:
        url: Of the endpoint, for the error.
        models: Those that it serves, by name.
        name: Set by the user; None: the only one.

    Raises:
        RewardError: It is not served, or there are several to choose from.
    """
    name = name or (next(iter(models)) if len(models) == 1 else None)
    if name is None or name not in models:
        listed = _one_line(", ".join(models), 200)
        raise RewardError(f"{url} serves {listed or 'no model'}; set model to one")
    return name
