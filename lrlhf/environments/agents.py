"""Agents: programs that call the policy through an OpenAI-compatible endpoint of the run.

`AgentSession` is one episode of an agent. `ChatEndpoint` serves chat completions, one key for each
conversation, and passes every request on as a `PendingRequest`. `read_chat_request` and
`completion` are the protocol: bodies as OpenAI's clients send and read them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Literal, NamedTuple
from weakref import WeakValueDictionary

from PIL import Image

try:
    import uvicorn
    from pydantic import BaseModel, ConfigDict, Field, ValidationError
    from pydantic_core import from_json
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise ImportError(
        f"agents need Starlette, uvicorn and pydantic ({error}): pip install 'lrlhf[serve]'"
    ) from error

from lrlhf.background import EventLoop
from lrlhf.environments.session import (
    EnvironmentFailure,
    Reaction,
    TurnPrompt,
    TurnTokens,
    accepted_columns,
    call,
    failure_of,
    finite_reward,
)
from lrlhf.environments.tool_calls import ToolCallFormat, call_ids, turn_message
from lrlhf.environments.tools import Tool
from lrlhf.media.decode import BadRow, MediaOptions, read_image
from lrlhf.media.parts import kind_of, parts_of, read_parts
from lrlhf.media.refs import MediaPart, PartOptions
from lrlhf.secrets import safe
from lrlhf.types import Message
from lrlhf.web import (
    KEEP_ALIVE_SECONDS,
    Body,
    Connection,
    ConnectionLimit,
    RefusedRequestError,
    allowed_connections,
    log_defect,
    parse_json,
)

logger = logging.getLogger(__name__)

MODEL: Final = "policy"
"""What the endpoint calls its model; clients may ask for any other."""
_PATHS: Final = "POST /v1/chat/completions, GET /v1/models"
_BACKLOG: Final = 2048
_CLOSE_SECONDS: Final = 5.0
MAX_BODY_BYTES: Final = 8_000_000
"""Of a request."""
MAX_BODY_BYTES_WITH_IMAGES: Final = 64_000_000
"""Of one that repeats the screenshots of a conversation."""
_MAX_PIXELS: Final = 2**28
"""Of the distinct images of a request, as they are scaled: 1.1 GB."""
_MAX_VALUES: Final = 200_000
"""Of the JSON in it, see `parse_json`."""
_READERS: Final = 4
"""Threads that read the images of all agents' requests."""
_SMALL: Final = 65_536
"""Bytes of a body that is parsed at once."""
_BODY_SECONDS: Final = 60.0
_MAX_CONNECTIONS: Final = 4096
"""Of agents, each of which takes two; beyond, those without a key have to go."""
_MAX_WARNED: Final = 20
"""Names of options without effect that are warned of."""


class AgentSession:
    """The conversation with an agent; see `EpisodeSession`.

    Concurrent requests of the agent are answered one after the other.

    Args:
        agent: Called once, with those columns of the row that its signature names, and with
            ``base_url``, ``api_key`` and ``model`` where it names them. It returns the reward of
            the episode, or None.
        endpoint: Receives its requests.
        read_calls: Finds calls in a turn of the policy.
        timeout: Seconds from an answer to the next request, or to the end.
        reset_timeout: Seconds to the first request.
    """

    environment: Any = None

    def __init__(
        self,
        agent: Callable[..., Any],
        endpoint: ChatEndpoint,
        read_calls: ToolCallFormat,
        *,
        timeout: float,
        reset_timeout: float,
    ) -> None:
        self._agent = agent
        self._name = f"{getattr(agent, '__name__', type(agent).__name__)}()"
        self._endpoint = endpoint
        self._read_calls = read_calls
        self._timeout = timeout
        self._reset_timeout = reset_timeout
        self._call_ids = call_ids()
        self._key: str | None = None
        self._running: asyncio.Task[Any] | None = None
        self._request: PendingRequest | None = None
        self._reward: float | None = 0.0

    @property
    def tools(self) -> list[Tool]:
        return []  # the agent calls its own, and describes them in its requests

    @property
    def has_rewards(self) -> bool:
        return self._reward is not None  # of an agent that was stopped it is 0

    async def open(self, row: Mapping[str, Any]) -> TurnPrompt:
        """Start the agent, and return its first request."""
        self._requests: asyncio.Queue[PendingRequest] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        requests = self._requests
        base_url, self._key = self._endpoint.enter(
            lambda request: loop.call_soon_threadsafe(requests.put_nowait, request)
        )
        available = {**row, "base_url": base_url, "api_key": self._key, "model": MODEL}
        function = partial(self._agent, **accepted_columns(self._agent, available))
        self._running = asyncio.ensure_future(call(function, []))
        prompt = await self._next(self._reset_timeout)
        if prompt is None:
            raise EnvironmentFailure(f"{self._name} ended without asking the policy anything")
        return prompt

    async def react(self, text: str, raw: str, tokens: TurnTokens | None = None) -> Reaction:
        """Answer the agent with a turn of the policy, and wait for its next request or its end."""
        assert self._request is not None
        read_calls = self._read_calls if self._request.prompt.tools else None
        message = turn_message(text, raw, read_calls, self._call_ids)
        self._request.answer(ChatAnswer(message, tokens))
        calls = tuple(
            {"type": "function", "function": each["function"]}
            for each in message.get("tool_calls", ())
        )
        prompt = await self._next(self._timeout)
        reason = "stop" if prompt is None else None
        return Reaction(calls, (), 0.0, reason, prompt, message["content"])

    async def outcome(self) -> float:
        return self._reward or 0.0

    async def close(self) -> None:
        """End the agent: its requests are not answered any more."""
        if self._key is not None:
            self._endpoint.leave(self._key)
        running, self._running = self._running, None
        if running is None or running.done():
            return
        running.cancel()
        await asyncio.wait({running}, timeout=self._timeout)
        if not running.done():
            raise EnvironmentFailure(f"{self._name} does not let itself be cancelled")
        if not running.cancelled():
            running.exception()  # retrieved, so that asyncio does not log it

    async def _next(self, limit: float) -> TurnPrompt | None:
        """Wait for a request; None: the agent has ended."""
        assert self._running is not None
        try:
            async with asyncio.timeout(limit):
                while not self._running.done():
                    pending = await self._request_or_end(self._running)
                    if pending is not None and pending.start():
                        self._request = pending
                        return pending.prompt
        except TimeoutError as error:
            what = f"{self._name} neither asked nor ended within {limit:g} s"
            raise EnvironmentFailure(what) from error
        if self._running.cancelled():
            raise EnvironmentFailure(f"{self._name} cancelled itself")
        if (raised := self._running.exception()) is not None:
            raise failure_of(self._name, raised) from raised
        returned = self._running.result()
        self._reward = None if returned is None else finite_reward(returned, self._name)
        return None

    async def _request_or_end(self, running: asyncio.Task[Any]) -> PendingRequest | None:
        pending = asyncio.ensure_future(self._requests.get())
        try:
            await asyncio.wait({pending, running}, return_when=asyncio.FIRST_COMPLETED)
            return pending.result() if pending.done() else None
        finally:
            pending.cancel()


class ConversationOverError(Exception):
    """A request will not be answered any more."""


class PendingRequest:
    """A request that waits for its answer.

    Args:
        prompt: Its messages and options.
    """

    def __init__(self, prompt: TurnPrompt) -> None:
        self.prompt = prompt
        self.future: Future[ChatAnswer] = Future()

    def start(self) -> bool:
        """Begin to answer; False: it was abandoned, or the client has disconnected."""
        with contextlib.suppress(RuntimeError):  # it is abandoned at this moment
            return not self.future.done() and self.future.set_running_or_notify_cancel()
        return False

    def answer(self, answer: ChatAnswer) -> None:
        """Send the client the answer."""
        with contextlib.suppress(InvalidStateError):  # it was abandoned
            self.future.set_result(answer)

    def give_up(self) -> None:
        """Report to the client that there will be no answer."""
        with contextlib.suppress(InvalidStateError):  # it is answered, or was abandoned
            self.future.set_exception(ConversationOverError())


Ask = Callable[[PendingRequest], object]
"""Receives a request, in the endpoint's thread; raises `RuntimeError` if it cannot."""


class ChatEndpoint:
    """Serves chat completions to programs of this machine with a key, from a thread of its own.

    It starts with the first key. It ends when it is closed, with the object, or with the process.
    """

    media: MediaOptions | None = None
    """How images in requests are read; None: they are refused."""

    def __init__(self) -> None:
        self._server: _Server | None = None
        self._begin()

    def __reduce__(self) -> tuple[type[ChatEndpoint], tuple[()]]:
        return ChatEndpoint, ()  # a copy serves no conversation yet

    def enter(self, ask: Ask) -> tuple[str, str]:
        """Open a conversation whose requests ``ask`` receives.

        Returns:
            The base URL for clients, and the key that their requests must have.
        """
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._reset_after_fork()
        with self._lock:
            if self._server is None:
                self._server = self._started()
            self._conversations.open(key, ask)
            return f"http://127.0.0.1:{self._server.port}/v1", key

    def leave(self, key: str) -> None:
        """End a conversation, with the requests that still wait in it."""
        self._conversations.end(key)

    def close(self) -> None:
        """End all conversations, and stop listening."""
        self._reset_after_fork()
        with self._lock:
            self._conversations.end_all()
            server = self._server
            if server is not None:
                server.uvicorn.should_exit = True
                with contextlib.suppress(TimeoutError):
                    server.running.result(_CLOSE_SECONDS)
            self._loop.close(_CLOSE_SECONDS)
            self._begin()

    def _reset_after_fork(self) -> None:
        # a forked process has a copy of the object and none of its thread
        if self._process != os.getpid():
            self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._conversations = _Conversations()
        self._loop = EventLoop("agents")
        self._server = None

    def _started(self) -> _Server:
        limit = ConnectionLimit(allowed_connections(_MAX_CONNECTIONS), math.inf, lambda _: None)
        listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        # it must not hold the endpoint, with which it ends
        server = uvicorn.Server(
            uvicorn.Config(
                _app(self._conversations, self.media),
                http=partial(Connection, limit),  # type: ignore[arg-type]
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
        return _Server(listener.getsockname()[1], server, running)


class _Server(NamedTuple):
    port: int
    uvicorn: uvicorn.Server
    running: Future[None]


class _Conversations:
    """Open conversations and their waiting requests, by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, tuple[Ask, set[PendingRequest]]] = {}
        self._warned: set[str] = set()

    def open(self, key: str, ask: Ask) -> None:
        with self._lock:
            self._open[key] = (ask, set())

    def end(self, key: str) -> None:
        with self._lock:
            _, waiting = self._open.pop(key, (None, set()))
            requests = [*waiting]
        for pending in requests:
            pending.give_up()

    def end_all(self) -> None:
        for key in [*self._open]:
            self.end(key)

    def has(self, key: str) -> bool:
        return key in self._open

    async def answer(self, key: str, request: ChatRequest, client: Request) -> ChatAnswer:
        """Pass a request on, and wait for the answer as long as the client does.

        Raises:
            ConversationOverError: There will be none.
            ClientDisconnect: The client has disconnected.
        """
        self._warn(request)
        pending = PendingRequest(request.prompt)
        with self._lock:
            if key not in self._open:
                raise ConversationOverError
            ask, waiting = self._open[key]
            waiting.add(pending)
        try:
            ask(pending)
        except RuntimeError as error:
            raise ConversationOverError from error
        try:
            return await _while_connected(pending, client)
        finally:
            with self._lock:
                waiting.discard(pending)

    def _warn(self, request: ChatRequest) -> None:
        room = _MAX_WARNED - len(self._warned)
        new = [safe(name[:60]) for name in request.ignored if name[:60] not in self._warned][:room]
        if new:
            self._warned.update(new)
            logger.warning(
                "an agent's requests set %s, which has no effect here: the run's own `sampling` "
                "sets how turns are sampled, and where they end",
                ", ".join(new),
            )


def _app(conversations: _Conversations, media: MediaOptions | None) -> Starlette:
    reader = ThreadPoolExecutor(_READERS, "agents-reader")

    async def complete(request: Request) -> Response:
        key = _key(request)
        if not conversations.has(key):
            return _no_such_key()
        try:
            request.state.known = True  # see Connection
            chat_request = await _read(request, reader, media)
            return completion(chat_request, await conversations.answer(key, chat_request, request))
        except RefusedError as error:
            return refusal(error.status, error.problem, param=error.param)
        except ConversationOverError:
            return refusal(410, "the conversation is over: this key is not served any more")
        except ClientDisconnect:
            return Response(status_code=499)  # which is not read
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


async def _read(
    request: Request, reader: ThreadPoolExecutor, media: MediaOptions | None
) -> ChatRequest:
    """Read the body, but no further than is allowed; parse a large one in a thread.

    Raises:
        RefusedError: It is too large, too slow or malformed.
        ClientDisconnect: The client has disconnected.
    """
    body = Body(request)
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            limit = MAX_BODY_BYTES if media is None else MAX_BODY_BYTES_WITH_IMAGES
            content = await body.read(limit)
        if len(content) <= _SMALL and media is None:
            return _parsed(content)
        return await asyncio.get_running_loop().run_in_executor(reader, _parsed, content, media)
    except RefusedRequestError as error:
        await body.discard()
        status = 400 if error.status == 422 else error.status  # as OpenAI's
        raise RefusedError(error.detail, status=status) from error
    except TimeoutError as error:
        what = f"the body did not arrive within {_BODY_SECONDS:g} s"
        raise RefusedError(what, status=408) from error


def _parsed(content: bytearray, media: MediaOptions | None = None) -> ChatRequest:
    return read_chat_request(parse_json(content, _MAX_VALUES), media)


async def _while_connected(pending: PendingRequest, client: Request) -> ChatAnswer:
    answer = asyncio.wrap_future(pending.future)
    # all of the body has come
    disconnect: asyncio.Future[Any] = asyncio.ensure_future(client.receive())
    either: set[asyncio.Future[Any]] = {answer, disconnect}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    except asyncio.CancelledError as error:  # the server ends
        raise ConversationOverError from error
    finally:
        disconnect.cancel()
        answer.cancel()  # and with it the request, unless it is being answered


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


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    with listener:
        try:
            await server.serve(sockets=[listener])
        except asyncio.CancelledError:
            server.force_exit = True
            await server.shutdown(sockets=[listener])
            raise


class RefusedError(ValueError):
    """A request that is answered with an error.

    Args:
        problem: What is wrong, and what to do, for the client.
        param: The part of the body that is wrong; None: all of it.
        status: Of the answer, in HTTP.
    """

    def __init__(self, problem: str, param: str | None = None, *, status: int = 400) -> None:
        super().__init__(problem)
        self.problem = problem
        self.param = param
        self.status = status


class ChatRequest(NamedTuple):
    """A request, and the form of its answer."""

    prompt: TurnPrompt
    model: str
    """The name in the request, which the answer repeats."""
    stream: bool
    include_usage: bool
    """Of a stream."""
    ignored: tuple[str, ...]
    """Options of the client's that have no effect."""


def read_chat_request(value: Any, media: MediaOptions | None = None) -> ChatRequest:
    """Check the body of a request, which `parse_json` has read.

    Content becomes text, or where ``media`` says how images are read parts with images, arguments
    of calls become objects and a developer becomes the system, as chat templates take them. What
    is empty is left out, and all else stays in the message.

    Raises:
        RefusedError: It is malformed, or requests what the endpoint does not have.
    """
    try:
        body = _Body.model_validate(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"])
        param = path.removeprefix(".") or None
        raise RefusedError(f"{param or 'the body'}: {first['msg']}", param) from error
    others = body.model_extra or {}
    for name, accepted in _ACCEPTED.items():
        if others.get(name) not in (None, [], *accepted):
            values = " or ".join(map(json.dumps, accepted))
            remedy = f"it takes {values}" if values else "leave it out"
            raise RefusedError(f"{name}: this endpoint does not have that; {remedy}", name)
    hidden = others.get("tool_choice") == "none"
    messages = [_message(each, index, media) for index, each in enumerate(body.messages)]
    prompt = TurnPrompt(
        messages=_with_read_images(messages, media),
        tools=() if hidden else tuple(tool.model_dump() for tool in body.tools or ()),
        max_tokens=body.max_completion_tokens or body.max_tokens,
    )
    known = {*_ACCEPTED, *_WITHOUT_EFFECT}
    return ChatRequest(
        prompt,
        body.model,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        ignored=tuple(sorted(n for n, v in others.items() if v is not None and n not in known)),
    )


class _ContentPart(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str
    text: str | None = None


class _Function(BaseModel):
    name: str
    arguments: str = "{}"


class _Call(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: _Function


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[_ContentPart] | None = None
    tool_calls: list[_Call] | None = None


class _Schema(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str


class _Tool(BaseModel):
    type: Literal["function"]
    function: _Schema


class _StreamOptions(BaseModel):
    include_usage: bool | None = None


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")
    model: str = "policy"
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


_ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "audio": (),
    "functions": (),
    "function_call": (),
}
"""Accepted values of these options; with anything else the answer would not be as requested."""

_WITHOUT_EFFECT = frozenset(
    {
        *("metadata", "store", "service_tier", "safety_identifier", "user"),
        *("prompt_cache_key", "prompt_cache_retention"),
    }
)
"""Options that change no answer anywhere."""


_ReadKey = tuple[bytes, PartOptions, MediaOptions]
_read_before: WeakValueDictionary[_ReadKey, Image.Image] = WeakValueDictionary()
"""Images of the requests that are still in use, by content: agents repeat theirs in each."""


def _with_read_images(
    messages: Sequence[Message], media: MediaOptions | None
) -> tuple[Message, ...]:
    if media is None:
        return tuple(messages)
    read: list[Message] = []
    pixels: dict[int, int] = {}  # an image that is repeated counts once
    for message in messages:
        if parts := parts_of(message):
            try:
                content = read_parts(parts, media, _read_once)
            except BadRow as error:
                raise RefusedError(f"messages: {error}", "messages") from error
            message = {**message, "content": content}
            images = [part["image"] for part in content if part["type"] == "image"]
            pixels |= {id(image): image.width * image.height for image in images}
        if sum(pixels.values()) > _MAX_PIXELS:
            what = (
                f"messages: the images have {sum(pixels.values())} pixels, and {_MAX_PIXELS} is "
                "the most of one request: leave old ones out, or set data.media.max_pixels"
            )
            raise RefusedError(what, "messages")
        read.append(message)
    return tuple(read)


def _read_once(value: Any, media: MediaOptions) -> Image.Image:
    """Read an image; one whose content is repeated, once. A file may have changed."""
    shown, own = (
        (value.value, value.options) if isinstance(value, MediaPart) else (value, PartOptions())
    )
    if not isinstance(shown, str) or not shown.startswith("data:"):
        return read_image(value, media)
    key = (hashlib.sha256(shown.encode()).digest(), own, media)
    if (image := _read_before.get(key)) is None:
        image = _read_before[key] = read_image(value, media)
    return image


def _message(sent: _Message, index: int, media: MediaOptions | None) -> Message:
    message = {key: value for key, value in sent.model_dump().items() if value not in (None, [])}
    message["role"] = "system" if sent.role == "developer" else sent.role
    parts = [] if isinstance(sent.content, str) else sent.content or []
    shows = [media is not None and kind_of(part.model_dump()) is not None for part in parts]
    for part, shown in zip(parts, shows, strict=True):
        param = f"messages[{index}].content"
        if not shown and part.type != "text":
            raise RefusedError(f"{param}: this endpoint reads text, and no {part.type}", param)
        if not shown and part.text is None:
            raise RefusedError(f"{param}: a part of type 'text' has no text", param)
        if not shown and (other := kind_of({**part.model_dump(), "type": None})):
            raise RefusedError(f"{param}: a part of type 'text' has an {other} too", param)
    text = sent.content if isinstance(sent.content, str) else None
    message["content"] = "".join(part.text or "" for part in parts) if text is None else text
    if any(shows):
        message["content"] = [part.model_dump() for part in parts]
    if sent.tool_calls:
        message["tool_calls"] = [_call(call, index) for call in sent.tool_calls]
    return message


def _call(sent: _Call, index: int) -> Mapping[str, Any]:
    try:
        arguments = from_json(sent.function.arguments or "{}", allow_inf_nan=False)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        param = f"messages[{index}].tool_calls"
        raise RefusedError(
            f"{param}: the arguments of {sent.function.name} are no object in JSON", param
        )
    function = {"name": sent.function.name, "arguments": arguments}
    return {"id": sent.id, "type": "function", "function": function}


class ChatAnswer(NamedTuple):
    """A turn of the policy."""

    message: Message
    """As chat templates take it: the arguments of calls are objects."""
    tokens: TurnTokens | None = None
    """None: they were not counted."""

    @property
    def finish_reason(self) -> str:
        """Why it ended, in OpenAI's words."""
        if self.message.get("tool_calls"):
            return "tool_calls"
        return "length" if self.tokens is not None and self.tokens.cut_off else "stop"


def completion(request: ChatRequest, answer: ChatAnswer) -> Response:
    """Return the response to a request, as a stream where one was asked for."""
    head = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": request.model,
    }
    message, usage = _as_sent(answer.message), None
    if (tokens := answer.tokens) is not None:
        usage = {
            "prompt_tokens": tokens.prompt,
            "completion_tokens": tokens.written,
            "total_tokens": tokens.prompt + tokens.written,
        }
    if request.stream:
        return _stream(head, message, answer.finish_reason, request, usage)
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": answer.finish_reason,
    }
    return JSONResponse({**head, "object": "chat.completion", "choices": [choice], "usage": usage})


def refusal(
    status: int, message: str, *, code: str | None = None, param: str | None = None
) -> Response:
    """Return an error in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return JSONResponse({"error": error}, status_code=status, headers=headers)


def _stream(
    head: Mapping[str, Any],
    message: Mapping[str, Any],
    finish_reason: str,
    request: ChatRequest,
    usage: Mapping[str, int] | None,
) -> Response:
    """Return the complete turn as one piece of a stream of server-sent events, and its end."""
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, "tool_calls": calls} if calls else message
    pieces: list[list[Any]] = [
        [{"index": 0, "delta": delta, "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": finish_reason}],
    ]
    chunks = [{**head, "object": "chat.completion.chunk", "choices": piece} for piece in pieces]
    if request.include_usage:
        chunks = [{**chunk, "usage": None} for chunk in chunks]
        chunks.append({**chunks[0], "choices": [], "usage": usage})
    events = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
    content = "".join(f"data: {event}\n\n" for event in events)
    return Response(content, media_type="text/event-stream")


def _as_sent(message: Message) -> dict[str, Any]:
    """Return a message as the wire has it: arguments are texts, and no text is null."""
    sent: dict[str, Any] = {"role": "assistant", "content": message["content"]}
    if calls := message.get("tool_calls"):
        sent["content"] = message["content"] or None
        sent["tool_calls"] = []
        for call in calls:
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            sent["tool_calls"].append(
                {**call, "function": {**call["function"], "arguments": arguments}}
            )
    return sent
