"""The HTTP endpoint that agents talk to: OpenAI's chat completions, one key for each of them."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import os
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lrlhf.background import EventLoop
from lrlhf.environments.agents.chat_protocol import (
    ChatAnswer,
    ChatRequest,
    RefusedError,
    completion,
    read_chat_request,
    refusal,
)
from lrlhf.environments.session import Asked
from lrlhf.secrets import safe
from lrlhf.web.body import Body, RefusedRequestError, parse_json
from lrlhf.web.connections import KEEP_ALIVE_SECONDS, Connection, Door, room_for
from lrlhf.web.defects import log_defect

logger = logging.getLogger(__name__)

MODEL: Final = "policy"
"""What the endpoint calls its model; clients may ask for any other."""
_PATHS: Final = "POST /v1/chat/completions, GET /v1/models"
_BACKLOG: Final = 2048
_CLOSE_SECONDS: Final = 5.0
MAX_BODY_BYTES: Final = 8_000_000
"""Of a request."""
_MAX_VALUES: Final = 200_000
"""Of the JSON in it, see `parse_json`."""
_SMALL: Final = 65_536
"""Bytes of a body that is parsed at once."""
_BODY_SECONDS: Final = 60.0
_MAX_CONNECTIONS: Final = 4096
"""Of agents, each of which takes two; beyond, those without a key have to go."""
_MAX_WARNED: Final = 20
"""Names of options without effect that are warned of."""


class ConversationOverError(Exception):
    """Nobody will answer a request any more."""


class Question:
    """A request that waits for its answer.

    Args:
        asked: What is asked.
        user: Who asks, by the client's account; None: it does not say.
    """

    def __init__(self, asked: Asked, user: str | None = None) -> None:
        self.asked = asked
        self.user = user
        self.future: Future[ChatAnswer] = Future()

    def taken(self) -> bool:
        """Begin to answer; False: it was given up, or the client has gone."""
        with contextlib.suppress(RuntimeError):  # it is given up at this moment
            return not self.future.done() and self.future.set_running_or_notify_cancel()
        return False

    def answer(self, answer: ChatAnswer) -> None:
        """Give the answer."""
        with contextlib.suppress(InvalidStateError):  # it was given up
            self.future.set_result(answer)

    def refuse(self, problem: str, *, status: int = 400, code: str | None = None) -> None:
        """Tell the client why there is no answer, with a status of HTTP and OpenAI's code."""
        self._fail(RefusedError(problem, status=status, code=code))

    def give_up(self) -> None:
        """Tell the client that there will be no answer."""
        self._fail(ConversationOverError())

    def _fail(self, error: Exception) -> None:
        with contextlib.suppress(InvalidStateError):  # it is answered, or was given up
            self.future.set_exception(error)


Ask = Callable[[Question], object]
"""Takes a question, in the endpoint's thread; raises `RuntimeError` if nobody is there."""


class ChatEndpoint:
    """Serves chat completions to those who have a key, from a thread of its own.

    It starts with the first key. It ends when it is closed, with the object, or with the process.

    Args:
        host: Address to listen at.
        port: To listen at; 0: any that is free.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host = host
        self._port = port
        self._server: _Server | None = None
        self._begin()

    def __reduce__(self) -> tuple[type[ChatEndpoint], tuple[str, int]]:
        return ChatEndpoint, (self._host, self._port)  # a copy serves nobody yet

    def enter(self, ask: Ask, key: str | None = None) -> tuple[str, str]:
        """Open a conversation.

        Args:
            ask: Gets its questions.
            key: That its requests have to bring; None: a new one.

        Returns:
            The base URL for clients, and the key.

        Raises:
            OSError: The address cannot be listened at.
        """
        key = key or f"sk-{secrets.token_urlsafe(24)}"
        self._look_around()
        with self._lock:
            if self._server is None:
                self._server = self._started()
            self._conversations.open(key, ask)
            return f"http://{self._server.address}/v1", key

    def leave(self, key: str) -> None:
        """End a conversation: whoever still waits in it is told so."""
        self._conversations.end(key)

    def close(self) -> None:
        """End all conversations, and stop to listen."""
        self._look_around()
        with self._lock:
            self._conversations.end_all()
            server = self._server
            if server is not None:
                server.uvicorn.should_exit = True
                with contextlib.suppress(TimeoutError):
                    server.running.result(_CLOSE_SECONDS)
            self._begin()

    def _look_around(self) -> None:
        """A forked process has a copy of the object and none of its thread."""
        if self._process != os.getpid():
            self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._conversations = _Conversations()
        self._loop = EventLoop("agents")
        self._server = None

    def _started(self) -> _Server:
        door = Door(room_for(_MAX_CONNECTIONS), math.inf, lambda _: None)
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        address = (self._host, self._port)
        listener = socket.create_server(address, family=family, backlog=_BACKLOG)
        # it must not hold the endpoint, with which it ends
        server = uvicorn.Server(
            uvicorn.Config(
                _app(self._conversations),
                http=partial(Connection, door),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="error",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=1,
            )
        )
        running = self._loop.submit(_serve(server, listener))
        return _Server(_address(listener), server, running)


class _Server(NamedTuple):
    address: str
    uvicorn: uvicorn.Server
    running: Future[None]


class _Conversations:
    """Those who are being served, by their keys."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, tuple[Ask, set[Question]]] = {}
        self._warned: set[str] = set()

    def open(self, key: str, ask: Ask) -> None:
        with self._lock:
            self._open[key] = (ask, set())

    def end(self, key: str) -> None:
        with self._lock:
            _, waiting = self._open.pop(key, (None, set()))
            left = [*waiting]  # which leave as they are told
        for question in left:
            question.give_up()

    def end_all(self) -> None:
        for key in [*self._open]:
            self.end(key)

    def has(self, key: str) -> bool:
        return key in self._open

    async def answer(self, key: str, request: ChatRequest, client: Request) -> ChatAnswer:
        """Ask, and wait for the answer as long as the client does.

        Raises:
            ConversationOverError: There will be none.
            ClientDisconnect: The client has gone.
        """
        self._warn(request)
        question = Question(request.asked, request.user)
        with self._lock:
            if key not in self._open:
                raise ConversationOverError
            ask, waiting = self._open[key]
            waiting.add(question)
        try:
            ask(question)
        except RuntimeError as error:
            raise ConversationOverError from error
        try:
            return await _while_connected(question, client)
        finally:
            with self._lock:
                waiting.discard(question)

    def _warn(self, request: ChatRequest) -> None:
        room = _MAX_WARNED - len(self._warned)
        new = [safe(name[:60]) for name in request.ignored if name[:60] not in self._warned][:room]
        if new:
            self._warned.update(new)
            logger.warning(
                "an agent's requests set %s, which has no effect here: how turns are sampled, and "
                "where they end, is for the run's own `sampling` to say",
                ", ".join(new),
            )


def _app(conversations: _Conversations) -> Starlette:
    reader = ThreadPoolExecutor(1, "agents-reader")

    async def complete(request: Request) -> Response:
        key = _key(request)
        if not conversations.has(key):
            return _no_such_key()
        try:
            request.state.known = True  # see Connection
            asked = await _read(request, reader)
            return completion(asked, await conversations.answer(key, asked, request))
        except RefusedError as error:
            return refusal(error.status, error.problem, code=error.code, param=error.param)
        except ConversationOverError:
            return refusal(410, "the conversation is over: this key is not served any more")
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:  # noqa: BLE001  the next request may be answered
            log_defect("a defect of the endpoint,", error)
            return refusal(500, "the server failed to answer; its log says why")

    async def models(request: Request) -> Response:
        if not conversations.has(_key(request)):
            return _no_such_key()
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "lrlhf"}
        return JSONResponse({"object": "list", "data": [model]})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", complete, methods=["POST"]),
            Route("/v1/models", models, methods=["GET"]),
        ],
        exception_handlers={HTTPException: _answer_http_error},
    )


async def _read(request: Request, reader: ThreadPoolExecutor) -> ChatRequest:
    """Read the body, but no further than is allowed; nobody waits while a large one is parsed.

    Raises:
        RefusedError: It is too large, too slow or malformed.
        ClientDisconnect: The client has gone.
    """
    body = Body(request)
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            content = await body.read(MAX_BODY_BYTES)
        if len(content) <= _SMALL:
            return _parsed(content)
        return await asyncio.get_running_loop().run_in_executor(reader, _parsed, content)
    except RefusedRequestError as error:
        await body.discard()
        status = 400 if error.status == 422 else error.status  # as OpenAI's
        raise RefusedError(error.detail, status=status) from error
    except TimeoutError as error:
        what = f"the body did not arrive within {_BODY_SECONDS:g} s"
        raise RefusedError(what, status=408) from error


def _parsed(content: bytearray) -> ChatRequest:
    return read_chat_request(parse_json(content, _MAX_VALUES))


async def _while_connected(question: Question, client: Request) -> ChatAnswer:
    answer = asyncio.wrap_future(question.future)
    # all of the body has come
    gone: asyncio.Future[Any] = asyncio.ensure_future(client.receive())
    either: set[asyncio.Future[Any]] = {answer, gone}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    except asyncio.CancelledError as error:  # the server ends
        raise ConversationOverError from error
    finally:
        gone.cancel()
        answer.cancel()  # and with it the question, unless it is being answered


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _no_such_key() -> Response:
    return refusal(
        401,
        "no such API key, or its conversation is over: give the client the api_key that came with "
        "this base_url",
        code="invalid_api_key",
    )


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path} is not served; there are {_PATHS}"
    return refusal(error.status_code, what, code="not_found")


def _address(listener: socket.socket) -> str:
    """Return host and port for the URLs of clients on this machine."""
    host, port = listener.getsockname()[:2]
    ip = ipaddress.ip_address(host)
    if not ip.is_loopback:
        logger.warning(
            "listening at %s, port %d: other machines can reach the policy, and keys are sent "
            "unencrypted",
            host,
            port,
        )
    if ip.is_unspecified:
        host = "127.0.0.1" if ip.version == 4 else "::1"
    return f"[{host}]:{port}" if ip.version == 6 else f"{host}:{port}"


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    with listener:
        try:
            await server.serve(sockets=[listener])
        except asyncio.CancelledError:
            server.force_exit = True
            await server.shutdown(sockets=[listener])
            raise
