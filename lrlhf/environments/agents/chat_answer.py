"""Answers to chat completion requests, as OpenAI's clients read them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.responses import JSONResponse, Response

from lrlhf.environments.agents.chat_request import ChatRequest
from lrlhf.environments.session import TurnTokens
from lrlhf.types import Message


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
