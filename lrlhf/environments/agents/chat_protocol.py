"""The body of a chat completion request, as OpenAI's clients send it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from starlette.responses import JSONResponse, Response

from lrlhf.environments.session import Asked, TurnTokens
from lrlhf.types import Message


class RefusedError(ValueError):
    """A request that is answered with a sentence about what is wrong with it.

    Args:
        problem: What is wrong, and what to do, for the client.
        param: The part of the body that it is about; None: all of it.
        status: Of the answer, in HTTP.
        code: OpenAI's, for programs; None: it has none.
    """

    def __init__(
        self, problem: str, param: str | None = None, *, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.param = param
        self.status = status
        self.code = code


class ChatRequest(NamedTuple):
    """What is asked, and how it is to be answered."""

    asked: Asked
    user: str | None
    """Who asks, by the client's account."""
    model: str
    """The name that the client gave; the answer repeats it."""
    stream: bool
    include_usage: bool
    """Of a stream."""
    ignored: tuple[str, ...]
    """Options of the client's that have no effect."""


def read_chat_request(value: Any) -> ChatRequest:
    """Check the body of a request, which `parse_json` has read.

    Content becomes text, arguments of calls become objects and a developer becomes the system, as
    chat templates take them. What is empty is left out, and all else stays in the message.

    Raises:
        RefusedError: It is malformed, or asks for what the endpoint does not have.
    """
    try:
        body = _Body.model_validate(value, strict=True)
    except ValidationError as error:
        raise _told(error) from error
    others = body.model_extra or {}
    for name, accepted in _ACCEPTED.items():
        if others.get(name) not in (None, [], *accepted):
            taken = " or ".join(json.dumps(one) for one in accepted)
            remedy = f"it takes {taken}" if taken else "leave it out"
            raise RefusedError(f"{name}: this endpoint does not have that; {remedy}", name)
    hidden = others.get("tool_choice") == "none"
    asked = Asked(
        messages=tuple(_message(one, place) for place, one in enumerate(body.messages)),
        tools=() if hidden else tuple(tool.model_dump() for tool in body.tools or ()),
        max_tokens=body.max_completion_tokens or body.max_tokens,
    )
    known = {*_ACCEPTED, *_WITHOUT_EFFECT}
    return ChatRequest(
        asked,
        body.user,
        body.model,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        ignored=tuple(sorted(n for n, v in others.items() if v is not None and n not in known)),
    )


class _Part(BaseModel):
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
    content: str | list[_Part] | None = None
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
    user: str | None = None
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
"""What these options may be; with anything else the answer would not be what was asked for."""

_WITHOUT_EFFECT = frozenset(
    {
        *("metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention"),
    }
)
"""What changes no answer anywhere."""


def _message(given: _Message, place: int) -> Message:
    message = {key: value for key, value in given.model_dump().items() if value not in (None, [])}
    message["role"] = "system" if given.role == "developer" else given.role
    message["content"] = _text(given, place)
    if given.tool_calls:
        message["tool_calls"] = [_call(call, place) for call in given.tool_calls]
    return message


def _text(given: _Message, place: int) -> str:
    if given.content is None or isinstance(given.content, str):
        return given.content or ""
    for part in given.content:
        if part.type != "text" or part.text is None:
            where = f"messages[{place}].content"
            raise RefusedError(f"{where}: this endpoint reads text, and no {part.type}", where)
    return "".join(part.text or "" for part in given.content)


def _call(given: _Call, place: int) -> Mapping[str, Any]:
    try:
        arguments = from_json(given.function.arguments or "{}", allow_inf_nan=False)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        where = f"messages[{place}].tool_calls"
        raise RefusedError(
            f"{where}: the arguments of {given.function.name} are no object in JSON", where
        )
    function = {"name": given.function.name, "arguments": arguments}
    return {"id": given.id, "type": "function", "function": function}


def _told(error: ValidationError) -> RefusedError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in first["loc"])
    param = place.removeprefix(".") or None
    return RefusedError(f"{param or 'the body'}: {first['msg']}", param)


class ChatAnswer(NamedTuple):
    """A turn of the policy's."""

    message: Message
    """As chat templates take it: the arguments of calls are objects."""
    tokens: TurnTokens | None = None
    """None: nobody has counted."""

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
    message, usage = _as_sent(answer.message), _usage(answer.tokens)
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
    """Return the whole turn as one piece of a stream of server-sent events, and its end."""
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
        sent["tool_calls"] = [{**call, "function": _written(call["function"])} for call in calls]
    return sent


def _written(function: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**function, "arguments": arguments}


def _usage(tokens: TurnTokens | None) -> Mapping[str, int] | None:
    if tokens is None:
        return None
    return {
        "prompt_tokens": tokens.prompt,
        "completion_tokens": tokens.written,
        "total_tokens": tokens.prompt + tokens.written,
    }
