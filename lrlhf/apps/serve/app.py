"""The service as an ASGI application, and uvicorn serving it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hmac
import ipaddress
import itertools
import logging
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lrlhf.apps.serve.batcher import ActiveRequest, Batcher, Measures, Scorer, Scores, Served
from lrlhf.apps.serve.score_request import (
    MediaFiles,
    PixelRoom,
    QueueOptions,
    RequestLimits,
    ScoreRequest,
    add_media,
    check_keys,
    check_sizes,
    decoded,
    entries,
    kind_of,
    read_score_request,
)
from lrlhf.noted_signals import noted_signals
from lrlhf.rewards import RewardFunction
from lrlhf.rewards.learned import TextMarks
from lrlhf.rewards.remote.service_client import DEFAULT_TOKEN_ENV
from lrlhf.web import (
    KEEP_ALIVE_SECONDS,
    Body,
    Connection,
    ConnectionLimit,
    RefusedRequestError,
    allowed_connections,
    check_headers,
    log_defect,
    malformed,
    parse_json,
)

_JPEG = b"\xff\xd8\xff"


def read_lightrft_request(body: Any, limits: RequestLimits, marks: TextMarks) -> ScoreRequest:
    """Read the body of a client of LightRFT (or OpenRLHF, which has no images).

    ``queries`` are prompt and response as one text, decoded from the policy's tokens: padding at
    both ends is dropped, and as many marks as an image has tokens become the one that a processor
    expects. ``references`` and ``labels`` become columns.
    """
    check_keys(body, ("queries",), ("prompts", "references", "labels", "images"))
    queries = _texts(body, "queries")
    count = len(queries)
    prompts = _texts(body, "prompts", count) if body.get("prompts") is not None else [""] * count
    check_sizes(prompts, queries, limits)
    files = MediaFiles(limits)
    images = add_media(files, {"images": _separated(body.get("images"))}, "image", count)
    rows = [
        _split(query, prompt, marks, len(images[row] or ()) if images else 0)
        for row, (query, prompt) in enumerate(zip(queries, prompts, strict=True))
    ]
    return ScoreRequest(
        prompts=[prompt for prompt, _ in rows],
        completions=[completion for _, completion in rows],
        images=images,
        columns={
            name: entries(body[name], name, count)
            for name in ("references", "labels")
            if body.get(name) is not None
        },
        files=files or None,
    )


def _texts(body: dict[str, Any], key: str, count: int | None = None) -> list[str]:
    values = entries(body[key], key, count)
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise malformed(f"{key}[{row}]", f"expected text, found {kind_of(value)}")
    return values


def _split(query: str, prompt: str, marks: TextMarks, images: int) -> tuple[str, str]:
    query, prompt = (_unpadded(text, marks.padding) for text in (query, prompt))
    if not query.startswith(prompt):  # where the response begins is unknown
        prompt, query = (query, "") if images else ("", query)
    else:
        query = query[len(prompt) :]
    if not images or not marks.media:
        return prompt, query
    mark = marks.media[0]  # that of images
    run = re.compile(f"(?:{re.escape(mark)})+")
    in_prompt, in_query = (
        [len(each) // len(mark) for each in run.findall(text)] for text in (prompt, query)
    )
    lengths = [*in_prompt, *in_query]
    counts = _image_counts(lengths, max(in_prompt or in_query, default=0), images)
    # marks count in prompts only; of an episode, whose turns show images too, all of it is one
    turns_show = sum(counts[: len(in_prompt)]) < sum(counts) == images
    left = iter(counts if turns_show else [max(1, count) for count in counts])
    prompt, query = (run.sub(lambda _: mark * next(left), text) for text in (prompt, query))
    return (prompt + query, "") if turns_show else (prompt, query)


def _image_counts(lengths: Sequence[int], longest: int, images: int) -> list[int]:
    """Return how many images each run of marks stands for."""
    if longest < 2 or sum(lengths) <= images:  # as before a processor
        return [*lengths]
    # a single mark among runs of them is what the policy wrote
    counts = [int(length > 1) for length in lengths]
    runs = [at for at, length in enumerate(lengths) if length > 1]  # single marks may be many
    for _ in range(images - sum(counts)):  # images side by side make one run
        most = max(runs, key=lambda at: lengths[at] / counts[at])
        if counts[most] >= lengths[most]:
            break
        counts[most] += 1
    return counts


def _unpadded(text: str, padding: Sequence[str]) -> str:
    text = text[_padded(text, padding) :]
    # a pattern that is looked for at the end would be tried at every letter
    return text[: len(text) - _padded(text[::-1], [mark[::-1] for mark in padding])]


def _padded(text: str, marks: Sequence[str]) -> int:
    """Count the letters of the marks that a text begins with."""
    run = re.match(f"(?:{'|'.join(map(re.escape, marks))})*", text) if marks else None
    return run.end() if run else 0


def _separated(rows: Any) -> Any:
    """Undo what LightRFT's client does to rows of several images.

    It writes all images of a row into one buffer, so that each text holds all files up to its own.
    """
    if not isinstance(rows, list):
        return rows
    return [
        [*row[:1], *itertools.starmap(_without_start, itertools.pairwise(row))]
        if isinstance(row, list)
        else row
        for row in rows
    ]


def _without_start(before: Any, text: Any) -> Any:
    if not isinstance(before, str) or not isinstance(text, str) or len(text) <= len(before):
        return text
    # whole groups of three bytes keep their four letters
    same = len(before.rstrip("=")) // 4 * 4
    if text[:same] != before[:same]:
        return text
    earlier, content = decoded(before, "images"), decoded(text, "images")
    rest = content[len(earlier) :]
    if content.startswith(earlier) and rest.startswith(_JPEG):
        return base64.b64encode(rest).decode()
    return text


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
            with self.batcher.entered() as active:
                return served, await self._in_time(body, read, active)
        except RefusedRequestError as error:
            if error.status != 408:
                await body.discard()
            raise

    async def _in_time(self, body: Body, read: Read, active: ActiveRequest) -> Scores:
        seconds = self._queue.timeout_s
        try:
            async with asyncio.timeout(seconds) as limit:
                active.leave = functools.partial(_end_now, limit)
                request = await self._request(body, read, active)
                if request.files is None:
                    scored = self.batcher.submit(request, active)
                else:
                    scored = await asyncio.get_running_loop().run_in_executor(
                        self._decoders, self._submitted, request, active
                    )
                del request  # media wait decoded, and not as files too
                return await asyncio.wrap_future(scored)
        except TimeoutError as error:
            if active.made_room:
                raise RefusedRequestError(
                    "the body came so slowly that it had to make room for others",
                    status=408,
                    reason="slow body",
                ) from error
            if not active.has_arrived:
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

    async def _request(self, body: Body, read: Read, active: ActiveRequest) -> ScoreRequest:
        weigh = functools.partial(self.batcher.weigh, active)
        content = await body.read(int(self._limits.max_request_mb * 1e6), weigh)
        self.batcher.queue(active)
        readers = self._small_readers if len(content) <= _SMALL else self._readers
        return await asyncio.get_running_loop().run_in_executor(
            readers, lambda: read(parse_json(content, self._limits.max_values))
        )

    def _submitted(self, request: ScoreRequest, active: ActiveRequest) -> Future[Scores]:
        """Decode the media of a request when there is room for them, and have it scored."""
        assert request.files is not None
        pixels = request.files.pixels()
        self._room.take(pixels)
        try:
            scored = self.batcher.submit(request.decoded(), active)
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
    scheme, _, presented = header.partition(" ")
    same = hmac.compare_digest(presented.strip().encode("latin-1", "replace"), token.encode())
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


logger = logging.getLogger(__name__)

_BACKLOG = 256
_SPARE_CONNECTIONS = 448  # idle ones count too
_WATCH_SECONDS = 0.05


def check_exposure(host: str, token: str | None) -> None:
    """Make sure that a service without a token is reached from its own machine only.

    Raises:
        ValueError: It would be reached from elsewhere.
    """
    try:
        own = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may lead anywhere
        own = False
    if token is None and not own:
        raise ValueError(
            f"host is {host!r}, so that other machines reach the service, and it has no token: set "
            f"the environment variable {DEFAULT_TOKEN_ENV}, or token_file, or take 127.0.0.1"
        )


def serve(
    service: RewardService, *, host: str, port: int, max_queue: int, grace_seconds: float
) -> signal.Signals | None:
    """Serve until a signal comes; requests that are being answered then are finished.

    Args:
        service: What is served.
        host: Address to listen at.
        port: To listen at; 0: any that is free. It is logged.
        max_queue: Of the service; somewhat more connections may be open at once.
        grace_seconds: That requests may take to finish after the signal.

    Returns:
        The signal.

    Raises:
        OSError: The address cannot be listened at.
        Exception: What loading the model raised.
    """
    listener = _listening(host, port)
    server = new_server(service, max_queue=max_queue, grace_seconds=grace_seconds)
    with listener, noted_signals() as notes:
        asyncio.run(_serve(service, server, listener))
    if service.batcher.failure is not None:
        raise service.batcher.failure
    return notes[0] if notes else None


def new_server(service: RewardService, *, max_queue: int, grace_seconds: float) -> uvicorn.Server:
    """Build what listens, see `serve`; connections end by themselves, see `Connection`."""
    connections = allowed_connections(max_queue + _SPARE_CONNECTIONS)
    limit = ConnectionLimit(connections, grace_seconds, service.count_refused)
    config = uvicorn.Config(
        service.app,
        # httptools, which uvicorn would take where it is installed, has no limit to a head
        http=functools.partial(Connection, limit),  # type: ignore[arg-type]
        backlog=_BACKLOG,
        access_log=False,
        log_config=None,
        log_level="error",  # or a line for every request that is none
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(grace_seconds)),
        ws="none",
    )
    return uvicorn.Server(config)


async def _serve(service: RewardService, server: uvicorn.Server, listener: socket.socket) -> None:
    watch = asyncio.create_task(_watch(service, server, listener))
    try:
        await server.serve(sockets=[listener])
    finally:
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch


async def _watch(service: RewardService, server: uvicorn.Server, listener: socket.socket) -> None:
    """Tell when the model is there, and end the server if it cannot be loaded."""
    host, port = listener.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    logger.info("%s: loading the model", address)
    while service.batcher.served is None:
        if service.batcher.failure is not None:
            server.should_exit = True
            return
        await asyncio.sleep(_WATCH_SECONDS)
    served = service.batcher.served
    logger.info("%s serves %s, version %s", address, served.model, served.version)


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise OSError(f"cannot listen at {host}, port {port}: {error}") from error
