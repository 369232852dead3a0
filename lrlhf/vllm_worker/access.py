"""Who may talk to the server."""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

TOKEN_VARIABLE = "VLLM_API_KEY"
_OPEN = ("/health", "/ping")


class TokenGuard:
    """ASGI middleware that asks for the token on every route but the health check.

    vLLM's own check covers the OpenAI routes only, and not those that change weights.

    Args:
        app: What it guards.

    Raises:
        RuntimeError: The environment has no token.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        token = os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise RuntimeError(f"set {TOKEN_VARIABLE} to the token that the trainer will show")
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        # the third type, lifespan, comes from the server itself
        if scope["type"] in ("http", "websocket") and scope["path"] not in _OPEN:
            shown = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(shown, self._expected):
                if scope["type"] == "websocket":
                    reason = "a token is needed"
                    await send({"type": "websocket.close", "code": 1008, "reason": reason})
                else:
                    await send({"type": "http.response.start", "status": 401, "headers": []})
                    await send({"type": "http.response.body", "body": b"a token is needed\n"})
                return
        await self._app(scope, receive, send)
