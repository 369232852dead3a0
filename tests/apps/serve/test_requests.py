"""What a service answers to anything but a good request."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from lrlhf.apps.serve import score_request
from lrlhf.rewards import LearnedReward
from tests.apps.serve.conftest import Serving, Slow, body_of, file_of, lengths, text_of, wait_until
from tests.vlms import gif_bomb, picture

TOKEN = "s3cret-token"
PNG = text_of(file_of(Image.new("RGB", (8, 8))))
BMP = text_of(file_of(Image.new("RGB", (8, 8)), "BMP"))
TIFF = text_of(file_of(Image.new("RGB", (8, 8)), "TIFF"))
LIGHT = {"queries": ["a"], "prompts": [""]}


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        (f"Basic {TOKEN}", 401),
        (f"Bearer {TOKEN}x", 401),
        (f"bearer  {TOKEN}", 200),
    ],
)
def test_only_who_has_the_token_is_answered(
    serving: Serving, header: str | None, status: int
) -> None:
    client = serving(lengths, token=TOKEN)
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    for path in ("/v1/score", "/get_reward", "/"):
        answer = client.post(path, body_of() if path == "/v1/score" else LIGHT, headers=headers)
        assert answer.status_code == status, path
        if status == 401:
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "Authorization: Bearer" in answer.json()["detail"]
    for path in ("/version", "/metrics"):
        assert client.get(path, headers=headers).status_code == status
    assert client.get("/health").json() == {"status": "ok"}


def test_health_is_told_once_the_model_is_there(serving: Serving) -> None:
    loaded = threading.Event()

    class Late(LearnedReward):
        def prepare(self) -> None:
            assert loaded.wait(30)
            raise ValueError("no such model")

    client = serving(Late("nowhere"), wait=False)
    for answer in (client.get("/health"), client.post(body=body_of()), client.get("/version")):
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "2"
        assert answer.json() == {"detail": "the model is being loaded"}
    loaded.set()
    wait_until(lambda: client.service.batcher.failure is not None)
    answer = client.get("/health")
    assert (answer.status_code, "could not be loaded" in answer.text) == (503, True)


def test_the_version_follows_the_weights(
    serving: Serving, text_reward: str, tmp_path: Path
) -> None:
    def told(folder: Any = tmp_path / "copy", **options: Any) -> dict[str, Any]:
        return serving(LearnedReward(str(folder), **options)).get("/version").json()

    original = told(text_reward)
    assert (original["model"], original["heads"]) == (text_reward, ["reward"])
    shutil.copytree(text_reward, tmp_path / "copy")
    assert told()["version"] == original["version"]
    assert told(chat_template="x")["version"] != original["version"]
    file = tmp_path / "copy" / "model.safetensors"
    weights = load_file(file)
    weights["score.weight"][0, 0] += 1e-3
    save_file(weights, file, {"format": "pt"})
    assert told()["version"] != original["version"]


def said(**values: Any) -> bytes:
    return json.dumps({"prompts": ["a"], "completions": ["a"], **values}).encode()


def turn(part: Any) -> list[Any]:
    return [[{"role": "a", "content": [part]}]]


MALFORMED: list[tuple[bytes, str]] = [
    (b"", "it is no JSON"),
    (b"\xff\xfe", "it is no JSON"),
    (b"{}", "prompts: is missing"),
    (said(completions=3), "completions: expected a list, found a number"),
    (said(completions=[]), "prompts: 1 entries for 0 responses"),
    (said(prompts=turn(3)), "prompts[0][0].content[0]: expected a part"),
    (said(prompts=turn({"type": "image", "url": "http://x"})), 'expected {"type": "image"} alone'),
    (said(completions=turn({"type": "image"})), "content[0]: a response consists of text"),
    (said(image=[]), "'image': no such key; there are"),
    (said(images=[[3]]), "images[0][0]: expected base64"),
    (said(images=[["/etc/passwd"]]), "not by path or address"),
    (said(images=[["/etc/hosts/a"]]), "images[0][0]: it cannot be read; expected one of PNG, JPEG"),
    (said(images=[[TIFF]]), "images[0][0]: it cannot be read; expected one of PNG, JPEG"),
    (said(videos=[[BMP]]), "videos[0][0]: it cannot be read; expected one of PNG, GIF, WEBP"),
    (said(columns={"b": [1, 2]}), "columns.b: 2 entries"),
    (said(columns={"log_metric": [1]}), "columns.log_metric: no name for a column"),
    (said(columns={"b": [float("nan")]}), "it is no JSON"),
    (said(columns={"b": [0]}).replace(b"0", b"1e999"), "too large for a"),
    (said(columns={"b": [0]}).replace(b"0", b"9" * 5000), "it is no JSON: number out of range"),
    (said(prompts=["\ud800"]), "it is no JSON"),
    (b"[" * 100_000, "recursion limit exceeded"),
    (b"[" * 300 + b"]" * 300, "recursion limit exceeded"),
]


def test_what_is_no_request_is_told_so(serving: Serving) -> None:
    client = serving(lengths)
    for content, detail in MALFORMED:
        answer = client.raw(content)
        assert answer.status_code == 422, content[:100]
        assert detail in answer.json()["detail"]
        assert "Traceback" not in answer.text
    assert client.post(body=body_of()).json()["scores"] == [2.0]  # and it goes on


def test_limits_are_kept_to(serving: Serving) -> None:
    limits = {"max_items": 2, "max_chars": 10, "max_request_mb": 0.001}
    client = serving(lengths, limits=limits)
    fine = client.post(body={"prompts": ["12345", ""], "completions": ["67890", ""]})
    assert fine.status_code == 200
    chat = [{"role": "user", "content": "123456"}]
    for body, detail in [
        ({"prompts": [""] * 3, "completions": [""] * 3}, "3 responses in one request, and 2 are"),
        (body_of(prompts=["123456"], completions=["67890"]), "completions[0]: 11 characters"),
        (body_of(prompts=[chat], completions=["6"]), "completions[0]: 11 characters"),  # 4 + 6 + 1
        (body_of(columns={"a": ["x" * 1000]}), "the body has more than 0.001 MB"),
    ]:
        answer = client.post(body=body)
        assert (answer.status_code, detail in answer.json()["detail"]) == (413, True)


@pytest.mark.parametrize("told", [{"content-length": "10"}, {}])
def test_the_size_is_counted_and_not_believed(serving: Serving, told: dict[str, str]) -> None:
    client = serving(lengths, limits={"max_request_mb": 0.001})

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100_000):
            yield b" " * 100

    headers = {"content-type": "application/json", **told}
    sent = client.send("POST", "/v1/score", content=endless(), headers=headers)
    assert asyncio.run(sent).status_code == 413


IMAGE_LIMITS = {"max_images": 2, "max_megapixels": 0.02, "max_frames": 3}


def test_images_that_are_too_many_or_too_large_are_refused(serving: Serving) -> None:
    client = serving(lengths, limits=IMAGE_LIMITS)
    other, third = (text_of(file_of(Image.new("RGB", (9, side)))) for side in (8, 9))
    assert client.post(body=body_of(images=[[PNG] * 9 + [other]])).status_code == 200
    answer = client.post(body=body_of(images=[[PNG, other, third]]))
    assert (answer.status_code, "more than 2 images" in answer.text) == (422, True)
    # 201 * 100 pixels are more than 20000; all black, so that the file is small
    bomb = text_of(file_of(Image.new("L", (201, 100))))
    answer = client.post(body=body_of(images=[[bomb]]))
    assert (answer.status_code, "more than 0.02 million pixels" in answer.text) == (422, True)


def _animation(format: str, count: int) -> dict[str, Any]:
    frames = [Image.fromarray(np.full((8, 8, 3), 20 * i, np.uint8)) for i in range(count)]
    content = file_of(frames[0], format, save_all=True, append_images=frames[1:], duration=100)
    return body_of(videos=[[text_of(content)]])


@pytest.mark.parametrize("format", ["PNG", "GIF", "WEBP"])
def test_animations_are_videos_up_to_a_number_of_frames(serving: Serving, format: str) -> None:
    seen: list[Any] = []

    def noted(*, completions: list[str], videos: list[Any]) -> list[float]:
        seen.extend(videos)
        return [0.0] * len(completions)

    client = serving(noted, limits=IMAGE_LIMITS | {"max_megapixels": 1})
    assert client.post(body=_animation(format, 3)).status_code == 200
    assert seen[0][0].frames.shape == (3, 8, 8, 3)
    assert seen[0][0].fps == pytest.approx(10.0)
    answer = client.post(body=_animation(format, 4))
    assert (answer.status_code, "more than 3 frames" in answer.text) == (422, True)
    client = serving(noted, limits={"max_megapixels": 0.05})
    answer = client.post(body=_animation(format, 4))
    assert (answer.status_code, "million pixels" in answer.text) == (422, True)


@pytest.mark.parametrize("kind", ["images", "videos"])
@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF"])
def test_damaged_files_are_refused(serving: Serving, kind: str, format: str) -> None:
    client = serving(lengths)
    content = file_of(picture(1), format)
    draw = np.random.RandomState(0)
    for cut in (3, 20, len(content) // 2):
        answer = client.post(body=body_of(**{kind: [[text_of(content[:cut])]]}))
        assert answer.status_code == 422, (kind, format, cut)
        assert answer.json()["detail"].startswith(f"{kind}[0][0]: ")
    for _ in range(10):
        damaged = bytearray(content)
        for place in draw.randint(0, len(content), 20):
            damaged[place] = draw.randint(256)
        assert client.post(body=body_of(**{kind: [[text_of(damaged)]]})).status_code in (200, 422)


@pytest.mark.parametrize(
    ("raised", "status", "reason"),
    [(MemoryError(), 503, "out of memory"), (AssertionError(), 500, "error of the service")],
)
def test_a_file_is_not_blamed_for_what_the_service_lacks(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    raised: Exception, status: int, reason: str,
) -> None:  # fmt: skip
    def fail(*_: Any) -> Any:
        raise raised

    monkeypatch.setattr(score_request, "read_image", fail)
    answer = serving(lengths).post(body=body_of(images=[[PNG]]))
    assert (answer.status_code, reason in answer.text) == (status, True)
    assert ("retry-after" in answer.headers) == (status == 503)
    assert ("AssertionError" in caplog.text) == (status == 500)


def test_more_requests_than_may_wait_are_sent_away(serving: Serving) -> None:
    slow = Slow()
    client = serving(slow, max_queue=3)

    async def crowd() -> list[Any]:
        first = [asyncio.create_task(client.send("POST", "/", json=LIGHT)) for _ in range(3)]
        await asyncio.to_thread(slow.asked.wait, 30)
        refused = [await client.send("POST", "/", json=LIGHT) for _ in range(2)]
        told = await client.send("GET", "/metrics")
        slow.go.set()
        return [*refused, told, *(await asyncio.gather(*first))]

    *refused, told, one, two, three = asyncio.run(crowd())
    for answer in refused:
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert "3 requests wait already" in answer.json()["detail"]
    assert "\nlrlhf_reward_queue_requests 3.0\n" in told.text
    assert [answer.json()["rewards"] for answer in (one, two, three)] == [[1.0]] * 3
    assert client.metrics()["lrlhf_reward_queue_requests"] == 0


def test_a_request_that_takes_too_long_is_given_up(serving: Serving) -> None:
    slow = Slow()
    client = serving(slow, timeout_s=1.5, max_batch_size=1)
    for answer in client.together([LIGHT, LIGHT], "/"):
        assert answer.status_code == 503
        assert "no scores within 1.5 s" in answer.json()["detail"]
        assert answer.headers["retry-after"] == "1"
    slow.go.set()
    assert client.post("/", LIGHT).json()["rewards"] == [1.0]
    assert slow.calls == 2  # what was given up while it waited is not scored


def test_nothing_of_a_request_is_logged(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    client = serving(lengths, token=TOKEN, headers={"authorization": f"Bearer {TOKEN}"})
    client.post(body=body_of(completions=["a private answer"]))
    client.post(body=body_of(completions=[["a private answer"]]))
    client.post(body={"a private answer": 1})
    ours = [record.getMessage() for record in caplog.records if "httpx" not in record.name]
    assert "private" not in " ".join(ours)
    assert TOKEN not in caplog.text


def test_frames_that_are_larger_than_the_first_count(serving: Serving) -> None:
    client = serving(lengths, limits={"max_megapixels": 1})
    bomb = text_of(gif_bomb(1000, 2))  # 1000 x 1000 pixels in each of 3 frames
    answer = client.post(body=body_of(videos=[[bomb]]))
    assert answer.status_code == 422
    assert "more than 1 million pixels" in answer.json()["detail"]
