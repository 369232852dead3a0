"""OpenAI's chat completions, as many servers speak them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lrlhf.rewards.remote.remote_http import ServiceError


@dataclass(frozen=True)
class Reply:
    """What the judge has written, and what it took."""

    text: str
    finished: bool
    """Whether it came to its end by itself."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


def completions_address(url: str) -> str:
    """Return where questions are sent."""
    return f"{url}/chat/completions"


def encode_request(
    model: str, system: str, text: str, images: Sequence[str], options: Mapping[str, Any]
) -> bytes:
    """Return a request as JSON, the same bytes for the same question.

    Args:
        model: Its name at the endpoint.
        system: System prompt; empty: none.
        text: The question.
        images: PNG files in base64, that are shown before it.
        options: Other fields of the request.
    """
    pictures = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
        for image in images
    ]
    content: Any = [*pictures, {"type": "text", "text": text}] if pictures else text
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": content})
    body = {"model": model, "messages": messages, **options}
    return json.dumps(body, sort_keys=True, allow_nan=False).encode()


def read_reply(reply: Mapping[str, Any]) -> Reply:
    """Return what came back.

    Raises:
        ServiceError: It is no chat completion.
    """
    try:
        choice = reply["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    except (LookupError, TypeError) as error:
        raise ServiceError("the reply is no chat completion") from error
    if text is not None and not isinstance(text, str):
        raise ServiceError(f"the content of the reply is a JSON {type(text).__name__}, no text")
    usage = reply.get("usage")
    tokens = usage if isinstance(usage, Mapping) else {}
    return Reply(
        text or "",
        finished=reason == "stop",
        prompt_tokens=_count(tokens.get("prompt_tokens")),
        completion_tokens=_count(tokens.get("completion_tokens")),
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
