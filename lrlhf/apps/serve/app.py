"""The service as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lrlhf.apps.serve.batcher import Batcher, Place
from lrlhf.apps.serve.lightrft import read_lightrft_request
from lrlhf.apps.serve.limits import QueueOptions, RequestLimits
from lrlhf.apps.serve.measures import Measures
from lrlhf.apps.serve.score_request import PixelRoom, ScoreRequest, read_score_request
from lrlhf.apps.serve.scoring import Scorer, Scores, Served
from lrlhf.rewards import RewardFunction
from lrlhf.web import Body, RefusedRequestError, check_headers, log_defect, parse_json

_SCORING: Final = ("/v1/score", "/get_reward", "/")
_TELLING: Final = ("/health", "/version", "/metrics")
_SMALL: Final = 65_536
"""Bytes of a body that does not wait until larger ones are parsed."""
_DECODERS: Final = 2

Read = Callable[[Any], ScoreRequest]


class RewardService:
    """A reward function behind HTTP.

    Args:
        scorer: What scores, or a reward function, see `Scorer`.
        token: That clients have to send; None: anybody may ask.
        limits: What one request may hold.
        queue: How many requests are served at once.
    """

    def __init__(
        self,
        scorer: Scorer | RewardFunction | Callable[..., Any] | str,
        *,
        token: str | None = None,
        limits: RequestLimits | None = None,
        queue: QueueOptions | None = None,
    ) -> None:
        self._token = token
        self._limits = limits or RequestLimits()
        self._queue = queue or QueueOptions()
        self._measures = Measures()
        scorer = scorer if isinstance(scorer, Scorer) else Scorer(scorer)
        self.batcher = Batcher(scorer, self._queue, self._measures)
        self._readers = ThreadPoolExecutor(1, "reward-reader")
        self._small_readers = ThreadPoolExecutor(1, "reward-small-reader")
        self._decoders = ThreadPoolExecutor(_DECODERS, "reward-decoder")
        self._room = PixelRoom(int(self._limits.max_megapixels * 1e6 / 4))
        self.app = self._build()

    def close(self) -> None:
        """Score what waits, and end the threads."""
        self.batcher.close()
        self._room.close()
        for threads in (self._readers, self._small_readers, self._decoders):
            threads.shutdown(wait=False, cancel_futures=True)

    def count_refused(self, reason: str) -> None:
        """Count what came to no request, or to no answer, by reason."""
        self._measures.rejected.labels(reason).inc()

    def _build(self) -> Starlette:
        app = Starlette(
            routes=[
                Route("/v1/score", self._score, methods=["POST"]),
                Route("/get_reward", self._get_reward, methods=["POST"]),
                Route("/", self._get_reward, methods=["POST"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/version", self._version, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
            ],
            middleware=[Middleware(_Outermost, measures=self._measures)],
            exception_handlers={HTTPException: _answer_http_error},
            lifespan=self._lifespan,
        )
        # would answer with an address made of the client's own Host header
        app.router.redirect_slashes = False
        return app

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.batcher.start()
        try:
            yield
        finally:
            await asyncio.get_running_loop().run_in_executor(None, self.close)

    async def _score(self, request: Request) -> Response:
        served, scores = await self._scores(
            request, lambda body: read_score_request(body, self._limits)
        )
        return JSONResponse({"scores": scores, "model": served.model, "version": served.version})

    async def _get_reward(self, request: Request) -> Response:
        _, scores = await self._scores(
            request, lambda body: read_lightrft_request(body, self._limits, self._loaded().marks)
        )
        return JSONResponse({"rewards": scores})

    async def _health(self, _: Request) -> Response:
        self._loaded()
        return JSONResponse({"status": "ok"})

    async def _version(self, request: Request) -> Response:
        self._check_token(request)
        served = self._loaded()
        return JSONResponse(
            {
                "model": served.model,
                "version": served.version,
                "lrlhf": version("lrlhf"),
                "heads": served.heads,
                "head": served.head,
            }
        )

    async def _metrics(self, request: Request) -> Response:
        self._check_token(request)
        return Response(self._measures.text(), media_type="text/plain; version=0.0.4")

    async def _scores(self, request: Request, read: Read) -> tuple[Served, Scores]:
        body = Body(request)
        try:
            self._check_token(request)
            check_headers(request)
            served = self._loaded()
            with self.batcher.entered() as place:
                return served, await self._in_time(body, read, place)
        except RefusedRequestError as error:
            if error.status != 408:
                await body.discard()
            raise

    async def _in_time(self, body: Body, read: Read, place: Place) -> Scores:
        seconds = self._queue.timeout_s
        try:
            async with asyncio.timeout(seconds) as limit:
                place.leave = functools.partial(_end_now, limit)
                request = await self._request(body, read, place)
                if request.files is None:
                    scored = self.batcher.submit(request, place)
                else:
                    scored = await asyncio.get_running_loop().run_in_executor(
                        self._decoders, self._submitted, request, place
                    )
                del request  # media wait decoded, and not as files too
                return await asyncio.wrap_future(scored)
        except TimeoutError as error:
            if place.made_room:
                raise RefusedRequestError(
                    "the body came so slowly that it had to make room for others",
                    status=408,
                    reason="slow body",
                ) from error
            if not place.has_arrived:
                raise RefusedRequestError(
                    f"the body did not arrive within {seconds:g} s", status=408, reason="slow body"
                ) from error
            raise RefusedRequestError(
                f"no scores within {seconds:g} s: send fewer items, or raise the service's "
                "timeout_s",
                status=503,
                reason="timeout",
                retry_after=1,
            ) from error

    async def _request(self, body: Body, read: Read, place: Place) -> ScoreRequest:
        weigh = functools.partial(self.batcher.weigh, place)
        content = await body.read(int(self._limits.max_request_mb * 1e6), weigh)
        self.batcher.queue(place)
        readers = self._small_readers if len(content) <= _SMALL else self._readers
        return await asyncio.get_running_loop().run_in_executor(
            readers, lambda: read(parse_json(content, self._limits.max_values))
        )

    def _submitted(self, request: ScoreRequest, place: Place) -> Future[Scores]:
        """Decode the media of a request when there is room for them, and have it scored."""
        assert request.files is not None
        pixels = request.files.pixels()
        self._room.take(pixels)
        try:
            scored = self.batcher.submit(request.decoded(), place)
        except BaseException:
            self._room.release(pixels)
            raise
        scored.add_done_callback(lambda _: self._room.release(pixels))
        return scored

    def _check_token(self, request: Request) -> None:
        if self._token is None or _holds(request.headers.get("authorization", ""), self._token):
            request.state.known = True  # see Connection
            return
        raise RefusedRequestError(
            "a token is needed: send the header `Authorization: Bearer TOKEN` with this service's",
            status=401,
            reason="token",
        )

    def _loaded(self) -> Served:
        self.batcher.start()  # where no server has told of its start
        if self.batcher.served is None:
            raise RefusedRequestError(
                "the model could not be loaded; the service's log says why"
                if self.batcher.failure
                else "the model is being loaded",
                status=503,
                reason="not loaded",
                retry_after=2,
            )
        return self.batcher.served


def create_app(
    scorer: Scorer | RewardFunction | Callable[..., Any] | str,
    *,
    token: str | None = None,
    limits: RequestLimits | None = None,
    queue: QueueOptions | None = None,
) -> Starlette:
    """Return the service as an application for any ASGI server; options as of `RewardService`."""
    return RewardService(scorer, token=token, limits=limits, queue=queue).app


class _Outermost:
    """Answers what was refused, counts, and lets no exception out."""

    def __init__(self, app: ASGIApp, measures: Measures) -> None:
        self._app = app
        self._measures = measures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        statuses: list[int] = []

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        started = time.perf_counter()
        try:
            await self._app(scope, receive, counted)
        except ClientDisconnect:
            self._measures.rejected.labels("client gone").inc()
        except RefusedRequestError as error:
            self._measures.rejected.labels(error.reason).inc()
            await _refusal(error)(scope, receive, counted)
        except Exception as error:
            log_defect("a defect of the service,", error)
            self._measures.rejected.labels("defect").inc()
            if statuses:
                raise
            response = JSONResponse({"detail": "an error of the service"}, status_code=500)
            await response(scope, receive, counted)
        self._count(scope["path"], statuses, time.perf_counter() - started)

    def _count(self, path: str, statuses: list[int], seconds: float) -> None:
        known = path if path in (*_SCORING, *_TELLING) else "other"
        status = str(statuses[0]) if statuses else "none"
        self._measures.requests.labels(known, status).inc()
        if path in _SCORING:
            self._measures.latency.observe(seconds)


def _holds(header: str, token: str) -> bool:
    """Compare an ``Authorization`` header with the token, in a time that tells nothing of it."""
    scheme, _, given = header.partition(" ")
    same = hmac.compare_digest(given.strip().encode("latin-1", "replace"), token.encode())
    return same and scheme.lower() == "bearer"


def _end_now(limit: asyncio.Timeout) -> None:
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())


def _refusal(error: RefusedRequestError) -> JSONResponse:
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"detail": error.detail}, status_code=error.status, headers=headers)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    await Body(request).discard()
    paths = f"POST {', POST '.join(_SCORING)}, GET {', GET '.join(_TELLING)}"
    what = {404: "no such path", 405: "not by this method"}.get(error.status_code)
    detail = f"{what}; there are {paths}" if what else str(error.detail)
    return JSONResponse({"detail": detail}, status_code=error.status_code, headers=error.headers)
