"""Rewards from services elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lrlhf.rewards.function import (
    Completion,
    CopiesStartAfresh,
    LogMetric,
    PartialValues,
    RewardError,
    check_positive,
    column_of,
)
from lrlhf.rewards.remote.remote_http import (
    Exchange,
    ServiceError,
    checked_url,
    is_plain_and_remote,
    new_client,
)
from lrlhf.rewards.remote.remote_protocols import (
    LIGHTRFT_KEYS,
    LightrftProtocol,
    LrlhfProtocol,
    Protocol,
    Responses,
)
from lrlhf.rewards.remote.remote_services import Service, Services, backoff
from lrlhf.rewards.remote.service_token import DEFAULT_TOKEN_ENV, read_token
from lrlhf.types import Prompt

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_FIRST_PAUSE_S = 0.5
"""Before the first repetition, doubled with every further one."""
_TELL_S = 60.0
"""Between two lines that say that the run waits."""


class ServicesDownError(RuntimeError):
    """No reward service answered."""


@dataclass
class _Asked:
    """One call of the reward, while its batches are under way."""

    exchange: Exchange
    slots: asyncio.Semaphore
    log_metric: LogMetric
    deadline: float | None
    """On the clock of the event loop."""
    retries: int = 0
    unanswered: int = 0
    """Responses without a score because no service answered."""
    down_since: float | None = None
    """Since when the retries are used up and nothing was answered, on the same clock."""
    tell_at: float = -math.inf
    """When to say next that the services are waited for."""


class RemoteReward(CopiesStartAfresh):
    """The scores that one or several reward services give, see ``lrlhf serve-reward``.

    Responses are sent in batches, several at a time, each to the least busy service. A request
    that fails on one service is sent to the next, and again after a growing pause. A service that
    fails several times in a row is left alone for a while. Where no service answers in time, the
    responses get no value, and the failure is reported, which as a rule ends the run; with
    ``max_wait`` the run waits for the services to come back instead. A request that a service
    refuses (a wrong token, an unknown address, too large, malformed) stops the run.

    All services must have the same model: the scores must not depend on who answers.

    Args:
        urls: Address of the service, or a list of addresses, such as ``http://127.0.0.1:8100``.
        protocol: ``lrlhf``, or ``lightrft`` for services that speak LightRFT's.
        token_env: Environment variable that holds the token that the services want; without it,
            none is sent.
        token_file: File that holds the token, instead.
        timeout: Seconds for one request.
        total_timeout: Seconds for all requests of one call together; what was scored by then
            counts. null: no limit.
        retries: How often a batch is sent again after a failure. A busy service is given the time
            that it asks for, at most 30 s.
        batch_size: Responses per request.
        max_concurrency: Requests under way at a time, over all services.
        columns: Data columns that are sent along; a mapping tells under which name each is sent,
            such as ``{references: answer}`` for a service that speaks LightRFT's protocol.
        chat_template: Jinja text that turns chats into the text that LightRFT's protocol needs.
        startup_timeout: Seconds that a service may take to come up when the run starts.
        max_wait: Seconds that an outage may last in mid-run: while no service can be reached or is
            ready (HTTP 408, 425, 429, 502 to 504), requests are repeated, on top of
            ``total_timeout``, and a line a minute says so. null: however long. The deadline of the
            phase ``reward`` (`Deadlines`), and a ``timeout`` that ``Rewards`` is given, end the
            wait too.
        verify: Check the certificates of https addresses; a path: against the authorities in it.
    """

    ends_by_itself: ClassVar[bool] = True
    _not_copied = ("_services", "_ready")

    @classmethod
    def columns_read(cls, options: Mapping[str, Any]) -> Iterable[str]:
        columns: Mapping[str, str] | Sequence[str] = options.get("columns") or ()
        return columns.values() if isinstance(columns, Mapping) else columns

    def __init__(  # noqa: PLR0913  the keys of a user's config
        self,
        urls: str | list[str],
        protocol: Literal["lrlhf", "lightrft"] = "lrlhf",
        token_env: str = DEFAULT_TOKEN_ENV,
        token_file: str | None = None,
        timeout: float = 120.0,
        total_timeout: float | None = 1800.0,
        retries: int = 4,
        batch_size: int = 32,
        max_concurrency: int = 8,
        columns: list[str] | dict[str, str] | None = None,
        chat_template: str | None = None,
        startup_timeout: float = 60.0,
        verify: bool | str = True,
        max_wait: float | None = 0.0,
    ) -> None:
        self._urls = [checked_url(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self._urls or len(set(self._urls)) < len(self._urls):
            raise ValueError(f"urls must name at least one service, each once, and is {urls}")
        if chat_template and protocol != "lightrft":
            raise ValueError("chat_template is for protocol: lightrft; others are sent the turns")
        if verify == "":
            raise ValueError("verify is empty; give true, false, or a path to authorities")
        check_positive(
            timeout=timeout, total_timeout=total_timeout, batch_size=batch_size,
            max_concurrency=max_concurrency, startup_timeout=startup_timeout,
        )  # fmt: skip
        if retries < 0:
            raise ValueError(f"retries is {retries}; it must be 0 or more")
        if max_wait is not None and not max_wait >= 0:
            raise ValueError(f"max_wait is {max_wait}; it must be 0 or more, or null for no limit")
        self._token_env = token_env
        self._token_file = token_file
        self._timeout = timeout
        self._total_timeout = total_timeout
        self._retries = retries
        self._batch_size = batch_size
        self._max_concurrency = max_concurrency
        self._columns = (
            columns if isinstance(columns, dict) else {key: key for key in columns or ()}
        )
        if protocol == "lightrft" and (taken := LIGHTRFT_KEYS & {*self._columns.values()}):
            raise ValueError(
                f"columns: {', '.join(sorted(taken))} would replace what LightRFT's protocol sends "
                "under that name; choose another, as in {prompts: question}"
            )
        self._protocol: Protocol = (
            LightrftProtocol(chat_template) if protocol == "lightrft" else LrlhfProtocol()
        )
        self._startup_timeout = startup_timeout
        self._max_wait = math.inf if max_wait is None else max_wait
        self._verify = verify
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._services = Services(self._urls)
        self._ready = False

    def prepare(self) -> None:
        """Wait until a service answers; once one did, do nothing.

        Raises:
            RewardError: None does within ``startup_timeout``, one refuses to say its version, they
                have different models, or the token cannot be read.
        """
        if self._ready:
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(self._meet())
        else:  # in a notebook: a loop of its own needs a thread of its own
            with ThreadPoolExecutor(1) as thread:
                thread.submit(asyncio.run, self._meet()).result()
        self._ready = True

    async def __call__(
        self,
        *,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        log_metric: LogMetric,
        images: Sequence[Sequence[Any]] | None = None,
        videos: Sequence[Sequence[Any]] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        nothing: list[Sequence[Any]] = [()] * len(completions)
        responses = Responses(
            prompts=prompts,
            completions=completions,
            images=images or nothing,
            videos=videos or nothing,
            columns={
                key: column_of(columns, name, setting="columns")
                for key, name in self._columns.items()
            },
        )
        limit = math.inf if self._total_timeout is None else self._total_timeout
        deadline = asyncio.get_running_loop().time() + limit + self._max_wait
        async with new_client(self._verify, self._max_concurrency) as client:
            asked = _Asked(
                Exchange(client, self._timeout, self._token()),
                asyncio.Semaphore(self._max_concurrency),
                log_metric,
                deadline if math.isfinite(deadline) else None,
            )
            scores = await self._scores(asked, responses)
        log_metric("remote/retries", asked.retries)
        log_metric("remote/failures", asked.unanswered)
        if not asked.unanswered:
            return scores
        failure = (
            f"no reward service scored {asked.unanswered} of {len(scores)} responses: "
            f"{self._services.complaints()}"
        )
        if asked.unanswered == len(scores):
            raise ServicesDownError(failure)
        return PartialValues(scores, failure)

    async def _scores(self, asked: _Asked, responses: Responses) -> list[float | None]:
        starts = range(0, len(responses.completions), self._batch_size)
        parts = [responses.part(slice(start, start + self._batch_size)) for start in starts]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._batch(asked, part)) for part in parts]
        except ExceptionGroup as errors:  # the first one tells enough, and has its own type
            raise errors.exceptions[0] from None
        return list(itertools.chain.from_iterable(task.result() for task in tasks))

    async def _batch(self, asked: _Asked, part: Responses) -> list[float | None]:
        """Return the scores of a batch; None everywhere if no service gave any."""
        count = len(part.completions)
        try:
            async with asyncio.timeout_at(asked.deadline), asked.slots:
                # pictures take their time, and the loop has others to serve
                body = await asyncio.to_thread(self._protocol.encoded, part)
                return await self._answer(asked, body, count)
        except (ServiceError, TimeoutError):  # the services remember what was wrong
            asked.unanswered += count
            return [None] * count

    async def _answer(self, asked: _Asked, body: bytes, count: int) -> list[float | None]:
        """Ask one service after the other until one answers."""
        tried: set[Service] = set()
        failures = rounds = 0
        while True:
            service = await self._services.next(tried)
            started = time.monotonic()
            try:
                with service.asked():
                    reply = await asked.exchange.ask(self._protocol.address(service.url), body)
                    scores = self._protocol.scores(reply, count)
            except ServiceError as error:
                if error.wait is None:
                    failures += 1
                    tried.add(service)
                if failures > self._retries and not (error.down and self._waits(asked)):
                    raise
            else:
                service.heard(reply)
                asked.log_metric("remote/latency_s", time.monotonic() - started)
                asked.down_since = None
                return scores
            asked.retries += 1
            if len(tried) == len(self._services):
                tried.clear()
                rounds += 1
                await asyncio.sleep(backoff(rounds, first=_FIRST_PAUSE_S))

    def _waits(self, asked: _Asked) -> bool:
        """Whether an outage is waited for; say so now and then."""
        now = asyncio.get_running_loop().time()
        if asked.down_since is None:
            asked.down_since = now
        lasted = now - asked.down_since
        if lasted >= self._max_wait:
            return False
        if now >= asked.tell_at:
            asked.tell_at = now + _TELL_S
            logger.warning(
                "no reward service has answered for %.0f s, and the run waits for them "
                "(max_wait: %g s): %s",
                lasted,
                self._max_wait,
                self._services.complaints(),
            )
        return True

    def _token(self) -> str | None:
        """Read the token, which is kept nowhere but in the connections."""
        try:
            token = read_token(self._token_env, self._token_file)
        except ValueError as error:
            raise RewardError(str(error)) from None
        for url in self._urls:
            if token is not None and is_plain_and_remote(url) and url not in _TOLD:
                _TOLD.add(url)
                logger.warning(
                    "the token for the reward service %s can be read on its way there: the "
                    "address is not https",
                    url,
                )
        return token

    async def _meet(self) -> None:
        """Wait for the first service, and compare what models they have."""
        until = time.monotonic() + self._startup_timeout
        async with new_client(self._verify, self._max_concurrency) as client:
            exchange = Exchange(client, self._timeout, self._token())
            while True:
                greetings = (self._greet(exchange, service) for service in self._services)
                silent = [text for text in await asyncio.gather(*greetings) if text]
                if len(silent) < len(self._services):
                    break
                if time.monotonic() >= until:
                    raise RewardError(
                        f"no reward service answers within startup_timeout = "
                        f"{self._startup_timeout:g} s: {'; '.join(silent)}"
                    )
                await asyncio.sleep(_POLL_S)
        for text in silent:
            logger.warning("a reward service does not answer, and the others do: %s", text)
        self._services.check_versions()

    async def _greet(self, exchange: Exchange, service: Service) -> str:
        """Return what is wrong with a service; empty: nothing."""
        protocol = self._protocol
        try:
            if protocol.tells_version:
                await exchange.ask(f"{service.url}/health")
                service.heard(await exchange.ask(f"{service.url}/version"))
            else:
                await exchange.ask(protocol.address(service.url))
        except ServiceError as error:
            # others need not know GET, and answered
            known = error.answered and not protocol.tells_version
            return "" if known else f"{service.url}: {error}"
        except RewardError:
            if protocol.tells_version:
                raise
        return ""


_TOLD: set[str] = set()
"""Addresses that were warned of."""
