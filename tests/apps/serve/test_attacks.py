"""Hostile clients: each is answered or cut off, costs little, and holds nobody else up.

The same at full size, with memory and times, is `benchmarks/service_attacks.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import select
import socket
import threading
import time
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import lrlhf.apps.serve.app as server_module
import lrlhf.apps.serve.batcher as batcher
from lrlhf import web
from lrlhf.rewards import LearnedReward
from lrlhf.web import holds_more_values
from tests.apps.serve.conftest import (
    Listening,
    Serving,
    Slow,
    body_of,
    file_of,
    lengths,
    text_of,
    wait_until,
)

TOKEN = "s3cret-token"
HEAD = b"POST /v1/score HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
KNOWN = HEAD + f"authorization: Bearer {TOKEN}\r\n".encode()
ASKS = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_HEAD_SECONDS", "_ANSWER_SECONDS", "KEEP_ALIVE_SECONDS"):
        monkeypatch.setattr(web, name, 1.0)


def said(connection: socket.socket) -> str:
    """Read one answer in JSON."""
    content = b""
    while b"}" not in content:
        part = connection.recv(65536)
        assert part, content  # it was closed before
        content += part
    return content.decode()


def answer_of(connection: socket.socket) -> str:
    """Read until the service closes: its status line, or nothing."""
    content = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            content += part
    return content.split(b"\r\n")[0].decode().removeprefix("HTTP/1.1 ").strip()


def pour(connection: socket.socket, part: bytes, times: int, pause: float = 0.05) -> None:
    for _ in range(times):
        connection.sendall(part)
        time.sleep(pause)


@pytest.mark.parametrize(
    ("start", "block", "status"),
    [
        (HEAD, b"x: " + b"a" * 97 + b"\r\n", "431"),  # many headers, none of them long
        (b"POST /?", b"a" * 100, "431"),
        (b"", b"\x16\x03\x01" + b"\x00" * 97, "400"),  # TLS
    ],
)
def test_a_head_without_an_end_is_cut_at_16_kb(
    listening: Listening, start: bytes, block: bytes, status: str
) -> None:
    connection = listening(token=TOKEN).connect(start)
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 50_000_000:
            connection.sendall(block * 300)
            sent += 300 * len(block)
    assert sent < 50_000_000
    assert answer_of(connection) in (status, "")  # what is sent meanwhile may break the connection


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (HEAD + b"x: " + b"a" * 40_000 + b"\r\n\r\n", "431"),  # all at once
        (HEAD + b"x: 1\r\n" * 99 + b"\r\n", "431"),
        (HEAD + b"x: 1\r\n" * 98 + b"\r\n", "401"),
        (KNOWN + b"transfer-encoding: chunked\r\n\r\n1;" + b"a" * 100_000, "411"),
        (HEAD + b"transfer-encoding: gzip\r\n\r\n", "501"),
    ],
)
def test_what_costs_more_than_a_request_is_refused_in_words(
    listening: Listening, head: bytes, status: str
) -> None:
    address = listening(token=TOKEN)
    connection = address.connect(head)
    content = said(connection)
    assert content.startswith(f"HTTP/1.1 {status} ")
    assert len(json.loads(content.partition("\r\n\r\n")[2])["detail"]) > 10
    assert address.score(**ASKS) == 200


@pytest.mark.usefixtures("_soon")
def test_a_request_that_stays_half_sent_is_cut(listening: Listening) -> None:
    address = listening(token=TOKEN)
    for start in (b"", HEAD + b"x: "):
        assert answer_of(address.connect(start)) == ""
    connection = address.connect(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
    assert said(connection).startswith("HTTP/1.1 200 ")
    connection.sendall(b"GET /health HTTP/1.1\r\nx: ")  # a second request, in letters
    with pytest.raises(ConnectionError):
        pour(connection, b"a", 200)


@pytest.mark.usefixtures("_soon")
def test_a_client_that_does_not_read_its_answers_is_cut(listening: Listening) -> None:
    address = listening(token=TOKEN, timeout_s=0.4)
    connection = address.connect()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    request = f"GET /metrics HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {TOKEN}\r\n\r\n".encode()
    connection.settimeout(0.5)
    with contextlib.suppress(OSError):  # until nobody reads it
        pour(connection, request * 50, 1000, 0.0)
    wait_until(lambda: not address.open)


def test_strangers_make_room_for_others_and_clients_with_a_token_stay(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_SPARE_CONNECTIONS", 6)
    address = listening(token=TOKEN, max_queue=2)  # 8 connections
    with httpx.Client(base_url=address.url, headers=ASKS) as client:
        assert client.post("/v1/score", json=body_of()).status_code == 200
        kept = {id(pooled) for pooled in client._transport._pool.connections}  # type: ignore[attr-defined]
        held = [address.connect(HEAD) for _ in range(30)]
        assert address.score(**ASKS) == 200
        assert client.post("/v1/score", json=body_of()).status_code == 200
        assert {id(pooled) for pooled in client._transport._pool.connections} == kept  # type: ignore[attr-defined]
    assert [answer_of(connection) for connection in held[:20]] == [""] * 20


def test_bodies_that_do_not_arrive_take_no_place(listening: Listening) -> None:
    address = listening(token=TOKEN, max_queue=1, timeout_s=2)
    slow = [address.connect(KNOWN, b"content-length: 1000\r\n\r\n{") for _ in range(3)]
    wait_until(lambda: len(address.service.batcher.places) == 3)
    assert address.score(**ASKS) == 200
    assert said(slow[0]).startswith("HTTP/1.1 408 ")


def test_heavy_bodies_that_stop_in_the_middle_make_room_for_others(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batcher, "_GRACE_SECONDS", 60.0)
    address = listening(token=TOKEN, max_queue_mb=1.0, timeout_s=20)
    half = b"content-length: 500000\r\n\r\n{" + b" " * 400_000
    held = [address.connect(KNOWN, half) for _ in range(2)]
    places = address.service.batcher.places
    wait_until(lambda: [place.weight for place in [*places]] == [400_001] * 2)
    heavy = body_of(columns={"b": ["a" * 500_000]})
    post = functools.partial(httpx.post, f"{address.url}/v1/score", headers=ASKS, json=heavy)
    assert post().status_code == 429  # the others may only just have come
    monkeypatch.setattr(batcher, "_GRACE_SECONDS", 0.1)
    time.sleep(0.2)
    assert post().status_code == 200
    (given_up,) = select.select(held, [], [], 20)[0]
    answer = said(given_up)
    assert answer.startswith("HTTP/1.1 408 ")
    assert "make room for others" in answer


def test_heavy_bodies_leave_room_for_light_ones(serving: Serving) -> None:
    slow = Slow()
    client = serving(slow, max_queue_mb=3.0, max_batch_size=1)
    heavy = body_of(completions=["a" * 150_000], columns={"b": ["a" * 1_500_000]})

    async def crowd() -> list[Any]:
        first = [asyncio.create_task(client.send("POST", "/v1/score", json=heavy))]
        await asyncio.to_thread(slow.asked.wait, 30)
        refused = await client.send("POST", "/v1/score", json=heavy | {"videos": None})
        first.append(asyncio.create_task(client.send("POST", "/v1/score", json=body_of())))
        while len(client.service.batcher.places) < 2:
            await asyncio.sleep(0.01)
        slow.go.set()
        return [refused, *(await asyncio.gather(*first))]

    refused, one, light = asyncio.run(crowd())
    assert (refused.status_code, "max_queue_mb" in refused.json()["detail"]) == (429, True)
    assert [one.status_code, light.status_code] == [200, 200]
    assert client.post(body=heavy).status_code == 200


def _values(value: Any) -> int:
    """Count by walking: commas and opening brackets are entries but one, and containers."""
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(0, len(value) - 1) + sum(_values(entry) for entry in inner)


TEXTS = st.lists(st.sampled_from(["a", ",", "[", '"', "\\", '\\"', '\\\\",[{', "é,", "\n"])).map(
    "".join
)
VALUES = st.recursive(
    st.one_of(TEXTS, st.sampled_from([0, 1.5, None, True])),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(TEXTS, inner)),
)


@settings(derandomize=True, deadline=None)
@given(value=VALUES, ascii_only=st.booleans())
def test_values_are_counted_before_they_are_made(value: Any, ascii_only: bool) -> None:
    content = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert not holds_more_values(content, _values(value))
    assert holds_more_values(content, _values(value) - 1)


@pytest.mark.parametrize("value", ["[]", '{"a":1}', '"\\""', "1"])
def test_millions_of_values_are_refused_at_once(serving: Serving, value: str) -> None:
    client = serving(lengths, limits={"max_values": 1000})
    body = '{"prompts": ["a"], "completions": ["b"], "columns": {"c": [[%s]]}}'
    content = (body % ",".join([value] * 1001)).encode()
    answer = client.raw(content)
    assert (answer.status_code, "more than 1000 values" in answer.text) == (413, True)
    assert client.raw((body % ",".join([value] * 200)).encode()).status_code == 200


def _shown(size: int) -> dict[str, Any]:
    return body_of(images=[[text_of(file_of(Image.new("1", (size, size))))]])


def test_media_wait_as_files_until_there_is_room_for_their_pixels(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lrlhf.apps.serve.score_request as module  # noqa: PLC0415  its name is replaced

    asked, go, decoded = threading.Event(), threading.Event(), []

    def slow(*, images: Any) -> list[float]:
        asked.set()
        assert go.wait(30)
        return [float(row[0].width) for row in images]

    read = module.read_image
    monkeypatch.setattr(module, "read_image", lambda *a: decoded.append(1) or read(*a))
    client = serving(slow, limits={"max_megapixels": 0.1}, max_batch_size=1)

    async def crowd() -> list[Any]:
        tasks = []
        for size in (100, 101, 102, 103):  # a hundredth of a million pixels each
            tasks.append(asyncio.create_task(client.send("POST", "/v1/score", json=_shown(size))))
            await asyncio.to_thread(asked.wait, 30)
        while len(client.service.batcher.places) < 4:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(wait_until, lambda: len(decoded) >= 2)
        await asyncio.sleep(0.3)
        assert len(decoded) == 2  # one is scored, one waits decoded
        go.set()
        return await asyncio.gather(*tasks)

    answers = asyncio.run(crowd())
    assert [answer.json()["scores"] for answer in answers] == [[100.0], [101.0], [102.0], [103.0]]
    assert len(decoded) == 4


def test_who_gives_up_while_media_wait_gives_the_room_back(serving: Serving) -> None:
    slow = Slow()
    client = serving(slow, limits={"max_megapixels": 0.06}, timeout_s=2.0, max_batch_size=1)
    answers = client.together([_shown(100), _shown(101), _shown(102)])
    assert {answer.status_code for answer in answers} == {503}
    slow.go.set()
    assert client.post(body=_shown(120)).status_code == 200


def test_a_long_request_is_scored_in_parts_and_others_in_between(
    serving: Serving, text_reward: str, text_scores: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lrlhf.apps.serve.batcher as module  # noqa: PLC0415  its number is replaced

    monkeypatch.setattr(module, "_PART_COST", 150)
    entered, go = threading.Event(), threading.Event()

    class Watched(LearnedReward):
        def __call__(self, **arguments: Any) -> Any:
            entered.set()
            assert go.wait(30)
            return super().__call__(**arguments)

    client = serving(Watched(text_reward))
    texts = [f"{row} " + "x" * 100 for row in range(20)]
    ended: list[str] = []

    async def ask(name: str, body: Any) -> Any:
        answer = await client.send("POST", "/v1/score", json=body)
        ended.append(name)
        return answer

    async def crowd() -> list[Any]:
        long = asyncio.create_task(ask("long", {"prompts": [""] * 20, "completions": texts}))
        await asyncio.to_thread(entered.wait, 30)
        shorts = [asyncio.create_task(ask("short", body_of())) for _ in range(3)]
        while len(client.service.batcher.places) < 4:
            await asyncio.sleep(0.01)
        go.set()
        return await asyncio.gather(long, *shorts)

    long, *shorts = asyncio.run(crowd())
    assert ended == ["short"] * 3 + ["long"]
    assert long.json()["scores"] == pytest.approx(text_scores([""] * 20, texts), abs=1e-6)
    expected = pytest.approx(text_scores(["2 + 2 ="], [" 4"]), abs=1e-5)
    assert [short.json()["scores"] for short in shorts] == [expected] * 3
    assert client.metrics()["lrlhf_reward_items_total"] == 23
