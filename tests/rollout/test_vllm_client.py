"""What the trainer makes of a server's answers, the server being a function."""

from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest

from lrlhf.rollout import EngineFailure
from lrlhf.rollout.vllm.client import ServerClient

SECRET = "a-token-that-nobody-may-see"


@pytest.fixture
def client_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServerClient]:
    """A client whose server is a function."""
    plain, asynchronous = httpx.Client, httpx.AsyncClient

    def build(answer: Callable[[httpx.Request], Any]) -> ServerClient:
        transport = httpx.MockTransport(answer)
        monkeypatch.setattr(httpx, "Client", partial(plain, transport=transport))
        monkeypatch.setattr(httpx, "AsyncClient", partial(asynchronous, transport=transport))
        return ServerClient("http://here:1/", SECRET)

    return build


def test_every_request_but_the_health_check_shows_the_token(client_of) -> None:
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, request.headers.get("authorization")))
        return httpx.Response(200, json={"results": ["one", "two"]})

    client = client_of(answer)
    assert client.is_healthy()
    assert client.call_workers("lrlhf_describe") == ["one", "two"]
    assert seen == [("/health", None), ("/collective_rpc", f"Bearer {SECRET}")]


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (401, PermissionError, r"at http://here:1 requires another token: set VLLM_API_KEY"),
        (404, EngineFailure, r"answered /path with 404: what happened"),
        (429, EngineFailure, r"answered /path with 429: what happened"),
        (500, EngineFailure, r"answered /path with 500: what happened"),
        (400, ValueError, r"refused /path: what happened"),
    ],
)
def test_what_a_status_means(client_of, status: int, error: type[Exception], message: str) -> None:
    assert client_of(lambda _: httpx.Response(200)).post("/reset_mm_cache") is None
    assert client_of(lambda _: httpx.Response(200, text="Success: done")).post("/path") is None
    client = client_of(lambda _: httpx.Response(status, text="what happened"))
    with pytest.raises(error, match=message) as raised:
        client.post("/path", {})
    assert SECRET not in str(raised.value)
    assert not client.is_healthy()


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), httpx.ReadTimeout("late")])
def test_trouble_on_the_way_is_a_failure(client_of, error: httpx.TransportError) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        raise error

    client = client_of(answer)
    with pytest.raises(EngineFailure, match=rf"did not answer /path \({type(error).__name__}: "):
        client.post("/path")
    assert not client.is_healthy()
