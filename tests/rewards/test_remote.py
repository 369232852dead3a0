import asyncio
import base64
import copy
import io
import logging
import math
import pickle
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lrlhf.media import MediaOptions, Video, read_video
from lrlhf.rewards import RemoteReward, RewardError, RewardResult, Rewards
from lrlhf.rewards.remote import service_client
from lrlhf.rewards.remote.service_client import Service, ServiceError, Services
from tests.rewards.reward_server import (
    Server,
    breaks_off,
    drips,
    expected_score,
    floods,
    hangs,
    hangs_up,
    says,
    score,
    sends,
    serving,
    slowly,
)

TOKEN = "s3cret-Token_42"
QUICK: dict[str, Any] = {"timeout": 5.0, "startup_timeout": 3.0}


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_client, "_FIRST_PAUSE_S", 0.01)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as started:
        yield started


other = server


PROMPTS = [f"{'p' * (row % 5)}" for row in range(11)]
COMPLETIONS = ["c" * row for row in range(11)]
EXPECTED = [expected_score(*pair) for pair in zip(PROMPTS, COMPLETIONS, strict=True)]


def ask(reward: RemoteReward, count: int = 11, quota: float = 1.0, **columns: Any) -> RewardResult:
    """Score through `Rewards`, as a run does."""
    rewards = Rewards([reward], max_unscorable_fraction=quota)
    return rewards.score(
        PROMPTS[:count],
        COMPLETIONS[:count],
        [[0]] * count,
        [{name: values[row] for name, values in columns.items()} for row in range(count)],
    )


def remote(*servers: Server | str, **settings: Any) -> RemoteReward:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    return RemoteReward(urls, **QUICK | settings)


# ---------------------------------------------------------------------- what is scored


def test_scores_come_in_the_order_of_the_responses(server: Server) -> None:
    reward = remote(server, batch_size=3)
    for asked in (reward, pickle.loads(pickle.dumps(reward)), copy.deepcopy(reward)):
        server.script = [slowly(0.2)]  # the first batch is the last to be answered
        result = ask(asked)
        assert result.scores.tolist() == EXPECTED
        assert not result.failures
    assert len(server.requests) == 3 * math.ceil(11 / 3)


def test_a_response_that_the_service_could_not_score_is_not_left_to_the_other_functions(
    server: Server,
) -> None:
    def penalty(completions: list[str]) -> list[float]:
        return [-1.0] * len(completions)

    # too long for its model, of all responses to a prompt: as a learned reward in the run itself
    server.always = says({"scores": [None, 2.0], "version": "v1"})
    rewards = Rewards([remote(server), penalty], max_unscorable_fraction=0.5)
    result = rewards.score(["p", "q"], ["a", "b"], [[0]] * 2, [{}] * 2)
    assert result.scores[0].isnan()
    assert result.scores[1] == 2.0 - 1.0


def test_no_more_requests_are_under_way_than_allowed(server: Server) -> None:
    server.always = slowly(0.05)
    assert ask(remote(server, batch_size=1, max_concurrency=3)).scores.tolist() == EXPECTED
    assert server.most_under_way == 3


def test_chats_and_named_columns_are_sent(server: Server) -> None:
    prompt = ({"role": "user", "content": "hi"},)
    reply = [{"role": "assistant", "content": "hello"}]
    rewards = Rewards([remote(server, columns=["answer"])])
    rewards.score([prompt], [reply], [[1]], [{"answer": np.int64(7), "secret": 8}])
    assert server.requests == [
        {"prompts": [[*prompt]], "completions": [reply], "columns": {"answer": [7]}}
    ]
    with pytest.raises(RewardError, match=r"no column 'answer'.*set columns"):
        rewards.score([prompt], [reply], [[1]], [{"anwser": 7}])
    for column in ({2}, math.nan):
        with pytest.raises(RewardError, match=r"the column 'answer' cannot be sent as JSON"):
            rewards.score([prompt], [reply], [[1]], [{"answer": column}])


def test_images_and_videos_arrive_pixel_by_pixel(server: Server) -> None:
    generator = np.random.default_rng(0)
    image = Image.fromarray(generator.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    frames = generator.integers(0, 256, (4, 6, 5, 3), dtype=np.uint8)
    frames[2] = frames[1]  # a still moment
    result = ask(
        remote(server),
        3,
        images=[[image], [], [image, image]],
        videos=[[], [Video(frames, 1.5)], []],
    )
    assert not result.failures
    (body,) = server.requests
    assert [row and len(row) for row in body["images"]] == [1, None, 2]
    sent = Image.open(io.BytesIO(base64.b64decode(body["images"][2][1])))
    assert sent.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(sent), np.asarray(image))
    assert [row and len(row) for row in body["videos"]] == [None, 1, None]
    back = read_video(base64.b64decode(body["videos"][1][0]), MediaOptions())
    np.testing.assert_array_equal(back.frames, frames)
    assert back.fps == pytest.approx(1.5)


# ---------------------------------------------------------------------- LightRFT's protocol


def test_lightrft_gets_one_text_per_response(server: Server) -> None:
    image = Image.new("RGB", (8, 8), "red")
    reward = remote(server, protocol="lightrft", columns={"references": "answer", "labels": "kind"})
    result = ask(reward, 3, answer=["x", "y", "z"], kind=[1, 2, 3], images=[[], [image] * 2, []])
    assert result.scores.tolist() == [0.0, 2.0, 4.0]
    with pytest.raises(RewardError, match="no form for videos"):
        ask(remote(f"{server.url}/get_reward", protocol="lightrft"), 1, videos=[[object()]])
    (body,) = server.requests
    assert body["queries"] == ["", "pc", "ppcc"]
    assert body["prompts"] == ["", "p", "pp"]
    assert body["references"] == ["x", "y", "z"]
    assert body["labels"] == [1, 2, 3]
    assert [row and len(row) for row in body["images"]] == [None, 2, None]
    opened = Image.open(io.BytesIO(base64.b64decode(body["images"][1][1])))
    assert (opened.format, opened.size) == ("JPEG", (8, 8))


# ---------------------------------------------------------------------- misbehaving services

GARBAGE = {
    "no json": sends(b"<html>Bad gateway</html>"),
    "nan": sends(b'{"scores": [NaN, 1.0, 2.0]}'),
    "too large for float32": says({"scores": [1e39, 1.0, 2.0]}),
    "too few": says({"scores": [1.0, 2.0]}),
    "text": says({"scores": ["1.0", 1.0, 2.0]}),
    "a list": says([0.0, 1.0, 2.0]),
    "503": says({"detail": "loading"}, 503),
    "a redirect": says({}, 307, Location="http://example.org/"),
    "closes": hangs_up,
    "breaks off": breaks_off,
    "compressed": sends(b"\x1f\x8b\x08\x00", Content_Encoding="gzip"),
}


def test_a_fault_of_one_request_is_mended_by_the_next(server: Server) -> None:
    for name, fault in GARBAGE.items():
        server.script = [fault]
        result = ask(remote(server), 3)
        assert result.scores.tolist() == EXPECTED[:3], name
        assert not result.failures, name
        assert result.metrics["remote/retries"] == 1.0, name


def test_a_reply_that_does_not_end_in_time_is_given_up(server: Server) -> None:
    server.script = [hangs, drips]
    started = time.monotonic()
    result = ask(remote(server, timeout=2.0), 3)
    assert result.scores.tolist() == EXPECTED[:3]
    assert 4.0 <= time.monotonic() - started < 18
    assert result.metrics["remote/retries"] == 2.0


def test_the_pause_that_a_busy_service_asks_for_is_kept(server: Server) -> None:
    busy = (says({"detail": "busy"}, status, Retry_After="1") for status in (503, 429))
    server.script = [*busy]
    started, state = time.monotonic(), random.getstate()
    assert ask(remote(server, retries=0), 3).scores.tolist() == EXPECTED[:3]
    assert 2.0 <= time.monotonic() - started < 10
    assert random.getstate() == state  # which a resumed run repeats


def test_without_any_service_the_responses_have_no_value_and_all_are_blamed(
    server: Server, other: Server
) -> None:
    reward = remote(server, other, retries=1)
    reward.prepare()
    server.always = says({"detail": "out of memory"}, 500)
    other.always = sends(b"junk")
    result = ask(reward, 3)
    assert result.scores.isnan().all()
    assert f"{server.url}: HTTP 500: out of memory" in result.failures[0]
    assert f"{other.url}: the reply is no JSON" in result.failures[0]
    with pytest.raises(RewardError, match=r"no reward could score 3 of 3 (?s:.*)out of memory"):
        ask(reward, 3, quota=0.1)


def test_what_was_scored_counts_though_the_rest_was_not(server: Server) -> None:
    no = says({"detail": "no"}, 500)
    server.always = lambda handler: (score if handler.body["completions"] == [""] else no)(handler)
    result = ask(remote(server, batch_size=1, retries=0), 3)
    assert result.scores[0] == EXPECTED[0]
    assert result.scores[1:].isnan().all()
    assert "scored 2 of 3 responses" in result.failures[0]
    assert result.metrics["remote/failures"] == 2.0


@pytest.mark.parametrize("down", [hangs_up, says({}, 503)])
def test_an_outage_is_waited_for_if_one_chooses_so(
    server: Server, down: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_client, "_COOLDOWN_S", 0.05)
    server.always = down
    timer = threading.Timer(0.8, lambda: setattr(server, "always", None))
    timer.start()
    # beyond the limit for a service that answers, without a failure, and said once
    reward = remote(server, max_wait=None, total_timeout=0.2, retries=0)
    result = ask(reward)
    assert result.scores.tolist() == EXPECTED
    assert not result.failures
    said = [record for record in caplog.records if "the run waits" in record.getMessage()]
    assert len(said) == 1
    assert server.url in said[0].getMessage()
    timer.join()


@pytest.mark.parametrize(
    ("act", "max_wait"), [(hangs_up, 0.3), (says({}, 500), None), (sends(b"<html>"), None)]
)
def test_a_wrong_answer_is_not_waited_for_nor_an_outage_longer_than_allowed(
    server: Server, act: Any, max_wait: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_client, "_COOLDOWN_S", 0.05)
    server.always = act
    started = time.monotonic()
    result = ask(remote(server, max_wait=max_wait, retries=0), 3)
    assert (max_wait or 0) < time.monotonic() - started < 10
    assert result.scores.isnan().all()
    assert "no reward service scored 3 of 3" in result.failures[0]


@pytest.mark.parametrize(("status", "advice"), [(401, "token_env"), (413, "batch_size")])
def test_a_refusal_stops_the_run_with_the_sentence_of_the_service(
    server: Server, other: Server, status: int, advice: str
) -> None:
    server.always = other.always = says({"detail": "that will not do"}, status)
    with pytest.raises(RewardError, match=f"HTTP {status}: that will not do.*{advice}") as caught:
        ask(remote(server, other), 3)
    assert "http://127.0.0.1:" in str(caught.value)
    assert len(server.requests + other.requests) == 1
    server.always = other.always = says({"detail": None}, status)
    with pytest.raises(RewardError, match=f"HTTP {status}(;|$)"):
        ask(remote(server, other), 3)


def test_a_redirect_is_not_followed_with_the_token(
    server: Server, other: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LRLHF_REWARD_TOKEN", TOKEN)
    server.always = says({}, 307, Location=f"{other.url}/v1/score")
    result = ask(remote(server, retries=1), 3)
    assert f"a redirect to {other.url}/v1/score, which is not followed" in result.failures[0]
    assert other.requests == []


def test_a_gigabyte_is_not_read(server: Server) -> None:
    server.always = floods
    started = time.monotonic()
    result = ask(remote(server, retries=0), 3)
    assert f"the reply is longer than {service_client._MAX_BYTES} bytes" in result.failures[0]
    assert time.monotonic() - started < 15


# ---------------------------------------------------------------------- the breaker


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [1000.0]
    with monkeypatch.context() as patch:
        patch.setattr(service_client.time, "monotonic", lambda: now[0])
        yield now


def fail(service: Service, wait: float | None = None) -> None:
    with pytest.raises(ServiceError), service.request():
        raise ServiceError("boom", wait=wait)


def test_a_breaker_opens_after_failures_in_a_row_and_tries_one_request_later(
    clock: list[float],
) -> None:
    service = Service("http://a")
    fail(service)
    with service.request():
        pass  # a success: the row begins anew
    for _ in range(4):
        fail(service)
        assert service.ready_in() == 0
    fail(service)
    assert service.ready_in() == 10
    clock[0] += 10
    assert service.ready_in() == 0
    with service.request():
        assert service.ready_in() == math.inf  # nobody else until it is known
    fail(service)
    assert service.ready_in() == 0  # closed again: one failure is none in a row


def test_a_busy_service_is_no_broken_one_and_may_not_ask_for_an_hour(clock: list[float]) -> None:
    service = Service("http://a")
    for asked, kept in [(2, 2), (3600, 30)] * 3:
        fail(service, wait=asked)
        assert service.ready_in() == kept
        clock[0] += kept
    fail(service, wait=0)
    assert 0 < service.ready_in() < 1  # no busy loop


def test_the_least_busy_service_is_next_and_those_that_failed_come_last() -> None:
    services = Services(["http://a", "http://b", "http://c"])
    a, b, c = services

    async def chosen(*tried: Service) -> set[str]:
        return {(await services.next(tried)).url[-1] for _ in range(6)}

    assert asyncio.run(chosen()) == {"a", "b", "c"}
    assert asyncio.run(chosen(a)) == {"b", "c"}
    assert asyncio.run(chosen(a, b, c)) == {"a", "b", "c"}
    with a.request(), b.request():
        assert asyncio.run(chosen()) == {"c"}
        assert asyncio.run(chosen(c)) == {"a", "b"}


def test_a_broken_service_is_spared_until_it_is_back(
    server: Server, other: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_client, "_COOLDOWN_S", 0.5)
    monkeypatch.setattr(service_client, "_BREAKER_FAILURES", 2)
    reward = remote(server, other, batch_size=1, max_concurrency=1)
    reward.prepare()
    server.always = says({"detail": "boom"}, 500)
    assert ask(reward).scores.tolist() == EXPECTED
    asked = len(server.requests)
    assert 2 <= asked < 5  # of about half of 11; on a busy machine a trial may come in between
    assert f"{server.url} failed 2 times in a row and is left alone for 0.5 s" in caplog.text
    server.always = None
    time.sleep(0.5)
    assert ask(reward).scores.tolist() == EXPECTED
    assert len(server.requests) > asked
    assert f"{server.url} answers again" in caplog.text


# ---------------------------------------------------------------------- start and versions


def test_services_with_different_models_are_refused_and_a_change_is_said_aloud(
    server: Server, other: Server, caplog: pytest.LogCaptureFixture
) -> None:
    other.version = "v2"
    with pytest.raises(RewardError, match=r"different models.*fake v1.*fake v2"):
        remote(server, other).prepare()
    reward = remote(server)
    ask(reward, 2)
    assert "another model" not in caplog.text
    server.version = "v2"
    ask(reward, 2)
    ask(reward, 2)
    assert caplog.text.count("has another model than before: fake v2 instead of fake v1") == 1


# ---------------------------------------------------------------------- tokens


def test_the_token_goes_to_the_service_and_nowhere_else(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("LRLHF_REWARD_TOKEN", f"{TOKEN}\n")
    reward = remote(server, retries=0)
    ask(reward, 2)
    assert server.headers[-1]["Authorization"] == f"Bearer {TOKEN}"
    echo = says({"detail": f"you sent Bearer {TOKEN}"}, 500)
    server.always = echo
    result = ask(reward, 2)
    assert "you sent Bearer ***" in result.failures[0]
    server.always = says({"detail": {"headers": [TOKEN]}}, 422)
    with pytest.raises(RewardError, match=r"\*\*\*") as caught:
        ask(reward, 2)
    seen = [caplog.text, str(caught.value), repr(reward), repr(vars(reward)), *result.failures]
    assert not [text for text in seen if TOKEN in text]
    assert TOKEN.encode() not in pickle.dumps(reward)


def test_a_token_that_travels_in_the_open_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LRLHF_REWARD_TOKEN", TOKEN)
    for url in ("http://reward.invalid:1", "http://127.0.0.1:1", "http://localhost:1"):
        for _ in range(2):
            with pytest.raises(RewardError, match="no reward service answers"):
                remote(url, startup_timeout=0.01).prepare()
    assert caplog.text.count("can be read on its way") == 1
    assert "http://reward.invalid:1 can be read" in caplog.text


# ---------------------------------------------------------------------- life and settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"urls": ["http://a", "http://a/"]}, "each once"),
        ({"urls": "ftp://a"}, "no http address"),
        ({"urls": "http://a:b@c"}, "address of c holds more"),
        ({"urls": "http://a?token=x"}, "address of a holds more"),
        ({"timeout": 0}, "timeout is 0"),
        ({"retries": -1}, "retries is -1"),
        ({"chat_template": "x"}, "chat_template is for protocol: lightrft"),
        ({"verify": ""}, "verify is empty"),  # not the same as false
        ({"protocol": "lightrft", "columns": {"answer": "queries"}}, "queries would replace"),
        ({"protocol": "lightrft", "columns": ["images"]}, "images would replace"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        RemoteReward(**{"urls": "http://a"} | settings)
    assert "a:b" not in str(caught.value)
