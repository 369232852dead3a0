import asyncio
from typing import Any

import pytest

from lrlhf.vllm_worker.access import TokenGuard

TOKEN = "0123456789abcdef"


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


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", TOKEN)


RIGHT = (b"authorization", b"Bearer " + TOKEN.encode())
ROUTES = ["/v1/completions", "/collective_rpc", "/", "/health/", "/healthy", "//health"]
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


@pytest.mark.parametrize("path", ROUTES)
def test_nothing_but_the_health_check_is_answered_without_the_token(path: str) -> None:
    app = App()
    for headers in WRONG:
        start, body = ask(app, path, *headers)
        assert start["status"] == 401
        assert body["body"] == b"a token is needed\n"
    assert app.reached == []
    assert ask(app, path, RIGHT)[1]["body"] == b"yes"
    for open_to_all in ("/health", "/ping"):
        assert ask(app, open_to_all)[0]["status"] == 200
    assert app.reached == [path, "/health", "/ping"]


def test_a_websocket_needs_the_token_too_and_the_start_of_the_server_none() -> None:
    app = App()
    (closed,) = ask(app, "/v1/realtime", kind="websocket")
    assert closed["type"] == "websocket.close"
    assert closed["code"] == 1008  # policy violation, RFC 6455
    assert app.reached == []
    ask(app, "/v1/realtime", RIGHT, kind="websocket")
    ask(app, "/", kind="lifespan")
    assert app.reached == ["/v1/realtime", "/"]


@pytest.mark.parametrize("value", [None, ""])
def test_a_server_without_a_token_does_not_start(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("VLLM_API_KEY")
    else:
        monkeypatch.setenv("VLLM_API_KEY", value)
    with pytest.raises(RuntimeError, match="set VLLM_API_KEY"):
        TokenGuard(App())
