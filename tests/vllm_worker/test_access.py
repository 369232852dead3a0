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


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_anybody_may_ask_whether_the_server_lives(path: str) -> None:
    app = App()
    assert ask(app, path)[0]["status"] == 200
    assert app.reached == [path]


ROUTES = [
    "/v1/completions",
    "/v1/models",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/sleep",
    "/metrics",
    "/docs",
    "/",
    "/health/",
    "/healthy",
    "//health",
    "/v1/health",
]
WRONG = [
    (),
    ((b"authorization", b""),),
    ((b"authorization", b"Bearer "),),
    ((b"authorization", b"Bearer wrong"),),
    ((b"authorization", TOKEN.encode()),),
    ((b"authorization", b"Basic " + TOKEN.encode()),),
    ((b"authorization", b"Bearer " + TOKEN.encode()[:-1]),),
    ((b"authorization", b"Bearer " + TOKEN.encode() + b"0"),),
    ((b"authorization", "Bearer é".encode()),),
    ((b"x-authorization", b"Bearer " + TOKEN.encode()),),
]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("headers", WRONG)
def test_nothing_else_is_answered_without_the_token(
    path: str, headers: tuple[tuple[bytes, bytes], ...]
) -> None:
    app = App()
    start, body = ask(app, path, *headers)
    assert start["status"] == 401
    assert body["body"] == b"a token is needed\n"
    assert app.reached == []


@pytest.mark.parametrize("path", ROUTES)
def test_everything_is_answered_with_the_token(path: str) -> None:
    app = App()
    start, body = ask(app, path, (b"authorization", b"Bearer " + TOKEN.encode()))
    assert start["status"] == 200
    assert body["body"] == b"yes"
    assert app.reached == [path]


def test_a_websocket_needs_the_token_too() -> None:
    app = App()
    (closed,) = ask(app, "/v1/realtime", kind="websocket")
    assert closed["type"] == "websocket.close"
    assert closed["code"] == 1008  # policy violation, RFC 6455
    assert app.reached == []
    ask(app, "/v1/realtime", (b"authorization", b"Bearer " + TOKEN.encode()), kind="websocket")
    assert app.reached == ["/v1/realtime"]


def test_the_start_of_the_server_needs_no_token() -> None:
    app = App()

    async def begin() -> None:
        async def nothing(*_: Any) -> Any:
            return {}

        await TokenGuard(app)({"type": "lifespan"}, nothing, nothing)

    asyncio.run(begin())
    assert app.reached == ["lifespan"]


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
