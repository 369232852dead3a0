"""Asks services of one kind, one after the other until one answers."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lrlhf.rewards.function import RewardError, check_positive
from lrlhf.rewards.remote.remote_http import (
    Exchange,
    ServiceError,
    checked_url,
    is_plain_and_remote,
    new_client,
)
from lrlhf.rewards.remote.remote_services import Service, Services, backoff

DEFAULT_TOKEN_ENV = "LRLHF_REWARD_TOKEN"
_VISIBLE = re.compile(r"[!-~]+")


def read_token(token_env: str, token_file: str | None) -> str | None:
    """Read the token that clients send and services want.

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
    if not _VISIBLE.fullmatch(token):  # the token itself must not show up in a message
        raise ValueError(
            f"{source}: a token is one line of letters, digits and signs without spaces; write a "
            "new one, such as `openssl rand -hex 32` prints"
        )
    return token


logger = logging.getLogger(__name__)

ReadT = TypeVar("ReadT")

_POLL_S = 0.5
_FIRST_PAUSE_S = 0.5
"""Before the first repetition, doubled with every further one."""
_TELL_S = 60.0
"""Between two lines that say that the run waits."""


class ServicesDownError(RuntimeError):
    """No reward service answered."""


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Where services are, and how patiently they are asked; see `RemoteReward`.

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
        """Of the services."""
        urls = [self.urls] if isinstance(self.urls, str) else self.urls
        return [checked_url(url) for url in urls]

    @property
    def longest_outage(self) -> float:
        """Seconds; infinite: there is no limit."""
        return math.inf if self.max_wait is None else self.max_wait

    def new_exchange(self, client: Any) -> Exchange:
        """Return how requests are sent; the token is kept nowhere but in the connections.

        Raises:
            RewardError: The token cannot be read.
        """
        try:
            token = read_token(self.token_env, self.token_file)
        except ValueError as error:
            raise RewardError(str(error)) from None
        for url in self.addresses:
            if token is not None and is_plain_and_remote(url) and url not in _TOLD:
                _TOLD.add(url)
                logger.warning(
                    "the token for the reward service %s can be read on its way there: the "
                    "address is not https",
                    url,
                )
        return Exchange(client, self.timeout, token)


_TOLD: set[str] = set()
"""Addresses that were warned of."""


class ServiceClient:
    """The services of one reward, and what is known of each.

    Args:
        settings: Where they are, and how they are asked.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self.services = Services(settings.addresses)

    def meet(self, greet: Callable[[Exchange, Service], Awaitable[str]]) -> None:
        """Wait until a service answers.

        Args:
            greet: Asks a service who it is, and returns what is wrong with it; empty: nothing.

        Raises:
            RewardError: None does within ``startup_timeout``, or they have different models.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(self._meet(greet))
        else:  # in a notebook: a loop of its own needs a thread of its own
            with ThreadPoolExecutor(1) as thread:
                thread.submit(asyncio.run, self._meet(greet)).result()

    async def _meet(self, greet: Callable[[Exchange, Service], Awaitable[str]]) -> None:
        """Wait for the first service, and compare what models they have."""
        settings = self._settings
        until = time.monotonic() + settings.startup_timeout
        async with new_client(settings.verify, settings.max_concurrency) as client:
            exchange = settings.new_exchange(client)
            while True:
                greetings = (greet(exchange, service) for service in self.services)
                silent = [text for text in await asyncio.gather(*greetings) if text]
                if len(silent) < len(self.services):
                    break
                if time.monotonic() >= until:
                    raise RewardError(
                        f"no reward service answers within startup_timeout = "
                        f"{settings.startup_timeout:g} s: {'; '.join(silent)}"
                    )
                await asyncio.sleep(_POLL_S)
        for text in silent:
            logger.warning("a reward service does not answer, and the others do: %s", text)
        self.services.check_versions()

    @asynccontextmanager
    async def calls(self) -> AsyncIterator[Calls]:
        """Open connections for the requests of one call of the reward."""
        settings = self._settings
        limit = math.inf if settings.total_timeout is None else settings.total_timeout
        deadline = asyncio.get_running_loop().time() + limit + settings.longest_outage
        async with new_client(settings.verify, settings.max_concurrency) as client:
            yield Calls(
                self.services,
                settings,
                settings.new_exchange(client),
                deadline if math.isfinite(deadline) else None,
            )


class Calls:
    """One call of a reward, while its requests are under way.

    Args:
        services: That are asked.
        settings: How patiently.
        exchange: By which they are asked.
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
        self._tell_at = -math.inf
        """When to say next that the services are waited for."""

    async def ask(
        self,
        address: Callable[[str], str],
        encode: Callable[[], bytes],
        read: Callable[[Mapping[str, Any]], ReadT],
    ) -> ReadT | None:
        """Send a request until a service answers it.

        Args:
            address: Where it goes, given what the user wrote of a service.
            encode: Returns the request as JSON.
            read: Reads the reply; a `ServiceError` has the request sent again.

        Returns:
            What was read; None: no service answered. They remember what was wrong.
        """
        try:
            async with asyncio.timeout_at(self._deadline), self._slots:
                # pictures take their time, and the loop has others to serve
                body = await asyncio.to_thread(encode)
                return await self._answer(address, body, read)
        except (ServiceError, TimeoutError):
            return None

    async def _answer(
        self,
        address: Callable[[str], str],
        body: bytes,
        read: Callable[[Mapping[str, Any]], ReadT],
    ) -> ReadT:
        """Ask one service after the other until one answers."""
        tried: set[Service] = set()
        failures = rounds = 0
        while True:
            service = await self._services.next(tried)
            started = time.monotonic()
            try:
                with service.asked():
                    reply = await self._exchange.ask(address(service.url), body)
                    found = read(reply)
            except ServiceError as error:
                if error.wait is None:
                    failures += 1
                    tried.add(service)
                if failures > self._settings.retries and not (error.down and self._waits()):
                    raise
            else:
                service.heard(reply)
                self.latencies.append(time.monotonic() - started)
                self._down_since = None
                return found
            self.retries += 1
            if len(tried) == len(self._services):
                tried.clear()
                rounds += 1
                await asyncio.sleep(backoff(rounds, first=_FIRST_PAUSE_S))

    def _waits(self) -> bool:
        """Whether an outage is waited for; say so now and then."""
        now, longest = asyncio.get_running_loop().time(), self._settings.longest_outage
        if self._down_since is None:
            self._down_since = now
        lasted = now - self._down_since
        if lasted >= longest:
            return False
        if now >= self._tell_at:
            self._tell_at = now + _TELL_S
            logger.warning(
                "no reward service has answered for %.0f s, and the run waits for them "
                "(max_wait: %g s): %s",
                lasted,
                longest,
                self._services.complaints(),
            )
        return True


async def all_of(tasks: list[Awaitable[ReadT]]) -> list[ReadT]:
    """Wait for all; the first that fails ends the others, and its error is raised as it is."""

    async def settled(awaitable: Awaitable[ReadT]) -> ReadT:
        return await awaitable

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(settled(task)) for task in tasks]
    except ExceptionGroup as errors:  # the first one tells enough, and has its own type
        raise errors.exceptions[0] from None
    return [task.result() for task in running]
