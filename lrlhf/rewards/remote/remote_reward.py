"""Rewards from services elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from lrlhf.rewards.function import (
    Completion,
    CopiesStartAfresh,
    LogMetric,
    RewardError,
    check_positive,
    column_of,
)
from lrlhf.rewards.remote.in_parts import scores_of_parts
from lrlhf.rewards.remote.remote_http import Exchange, ServiceError
from lrlhf.rewards.remote.remote_protocols import (
    LIGHTRFT_KEYS,
    LightrftProtocol,
    LrlhfProtocol,
    Protocol,
    Responses,
)
from lrlhf.rewards.remote.remote_services import Service
from lrlhf.rewards.remote.service_client import (
    DEFAULT_TOKEN_ENV,
    Calls,
    ServiceClient,
    ServiceSettings,
)
from lrlhf.types import Prompt


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
    none_is_missing: ClassVar[bool] = True
    _not_copied = ("_client", "_ready")

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
        if chat_template and protocol != "lightrft":
            raise ValueError("chat_template is for protocol: lightrft; others are sent the turns")
        check_positive(batch_size=batch_size)
        self._batch_size = batch_size
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
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._client = ServiceClient(self._settings)
        self._ready = False

    def prepare(self) -> None:
        """Wait until a service answers; once one did, do nothing.

        Raises:
            RewardError: None does within ``startup_timeout``, one refuses to say its version, they
                have different models, or the token cannot be read.
        """
        if not self._ready:
            self._client.meet(self._greet)
            self._ready = True

    async def __call__(
        self,
        *,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        log_metric: LogMetric,
        images: Sequence[Sequence[Any]] | None = None,
        videos: Sequence[Sequence[Any]] | None = None,
        audios: Sequence[Sequence[Any]] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        if any(audios or ()):
            raise RewardError("a remote reward cannot be sent audio; use LearnedReward")
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
        starts = range(0, len(completions), self._batch_size)
        parts = [responses.part(slice(start, start + self._batch_size)) for start in starts]
        sized = [(part, len(part.completions)) for part in parts]
        return await scores_of_parts(self._client, sized, self._ask, log_metric, name="remote")

    async def _ask(self, calls: Calls, part: Responses) -> list[float | None] | None:
        """Return the scores of a batch; None: no service gave any."""
        return await calls.ask(
            self._protocol.address,
            partial(self._protocol.encoded, part),
            partial(self._protocol.scores, count=len(part.completions)),
        )

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
