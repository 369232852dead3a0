"""The body of a chat completion request, as OpenAI's clients send it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from lrlhf.environments.session import Asked
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
