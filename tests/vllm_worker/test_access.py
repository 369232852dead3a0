import asyncio
from typing import Any

import pytest

from lrlhf.vllm_worker.model_access import TokenGuard

TOKEN = "0123456789abcdef"
RIGHT = (b"authorization", b"Bearer " + TOKEN.encode())
WRONG = [
    (),
    ((b"authorization", b""),),
    ((b"authorization", TOKEN.encode()),),
    ((b"authorization", b"Basic " + TOKEN.encode()),),
    ((b"authorization", b"Bearer " + TOKEN.encode()[:-1]),),
    ((b"authorization", b"Bearer " + TOKEN.encode() + b"0"),),
    ((b"authorization", "Bearer é".encode()),),
    ((b"x-authorization", b"Bearer " + TOKEN.encode()),),
]


class App:
    """Answers 200 and keeps what reached it."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope.get("path", scope["type"]))
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"yes"})


def ask(
    app: App, path: str, *headers: tuple[bytes, bytes], kind: str = "http"
) -> list[dict[str, Any]]:
    """What a guarded app answers."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("the body of a request that is refused must not be read")

    async def send(message: Any) -> None:
        sent.append(dict(message))

    scope = {"type": kind, "path": path, "headers": list(headers)}
    asyncio.run(TokenGuard(app)(scope, receive, send))
    return sent


@pytest.mark.parametrize("path", ["/collective_rpc", "/", "/health/", "/healthy", "//health"])
def test_nothing_but_the_health_check_is_answered_without_the_token(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", TOKEN)
    app = App()
    for headers in WRONG:
        assert [message.get("status") for message in ask(app, path, *headers)] == [401, None]
        (closed,) = ask(app, path, *headers, kind="websocket")
        assert closed["type"] == "websocket.close"
        assert closed["code"] == 1008  # policy violation, RFC 6455
    assert app.reached == []
    assert ask(app, path, RIGHT)[1]["body"] == b"yes"
    ask(app, path, RIGHT, kind="websocket")
    for open_to_all in ("/health", "/ping"):
        assert ask(app, open_to_all)[0]["status"] == 200
    ask(app, "start of the server", kind="lifespan")
    assert app.reached == [path, path, "/health", "/ping", "start of the server"]


@pytest.mark.parametrize("value", [None, ""])
def test_a_server_without_a_token_does_not_start(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_API_KEY", value)
    with pytest.raises(RuntimeError, match="set VLLM_API_KEY"):
        TokenGuard(App())
