"""Where requests go, what becomes of those of a replica that fails, and how servers are kept."""

import asyncio
import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest

from lrlhf.rollout import EngineFailure
from lrlhf.rollout.responses import Response
from lrlhf.rollout.vllm.client import ServerClient
from lrlhf.rollout.vllm.dispatch import Targets, respond
from lrlhf.rollout.vllm.fleet import Fleet
from lrlhf.rollout.vllm.routing import BLOCK, Router
from lrlhf.rollout.vllm.server import Server
from lrlhf.rollout.vllm.vllm_base import EngineStartError

# ---------------------------------------------------------------------- routing


def test_requests_go_to_the_least_loaded_and_those_of_a_prompt_together() -> None:
    router = Router([0, 1, 2])
    place = partial(router.place, among=[0, 1, 2])
    # 2 tokens of prompt, computed once, and 3 x 10 of responses
    assert [(one.replica, one.tokens) for one in place([1, 2], [10] * 3)] == [
        (0, 12),
        (0, 10),
        (0, 10),
    ]
    assert place([3], [40])[0].replica == 1
    assert place([4], [5])[0].replica == 2
    third = place([5], [8])[0]  # 32, 41 and 6 tokens are there
    assert third.replica == 2
    assert place([6], [100])[0].replica == 2  # 32, 41 and 15
    router.finished(third)
    assert router.place([7], [1], among=[0, 1])[0].replica == 0


def test_ties_begin_with_another_replica_on_every_rank() -> None:
    for rank, expected in enumerate([[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]):
        router = Router([0, 1, 2], first=rank)
        placed = [router.place([1], [5], among=[0, 1, 2])[0].replica for _ in range(3)]
        assert placed == expected
    # a replica that is gone does not leave a hole
    assert Router([0, 2], first=1).place([1], [5], among=[0, 2])[0].replica == 2


def test_a_turn_goes_where_its_history_is_unless_that_replica_has_more_to_do() -> None:
    history = list(range(3 * BLOCK))
    router = Router([0, 1], first=1)
    first = router.place(history[: 2 * BLOCK], [BLOCK], among=[0, 1])[0]
    assert (first.replica, first.tokens) == (1, 3 * BLOCK)
    router.finished(first, history)
    follow = [*history, 7, 8]
    # the answer was remembered too: all three blocks are there
    second = router.place(follow, [10], among=[0, 1])[0]
    assert (second.replica, second.tokens) == (1, 2 + 10)
    router.finished(second)
    # up to as many tokens of other work as the history saves
    for work, expected in ((3 * BLOCK, 1), (3 * BLOCK + 1, 0)):
        busy = Router([0, 1], first=1)
        busy.finished(busy.place(history, [1], among=[1])[0], history)
        busy.place([], [work], among=[1])
        assert busy.place(follow, [10], among=[0, 1])[0].replica == expected
    # the same tokens behind another beginning are not the same prefix
    other = [9] * BLOCK + [8] * BLOCK
    router.finished(router.place(other, [1], among=[1])[0])
    crossed = [*history[:BLOCK], *other[BLOCK:]]
    assert router.place(crossed, [1], among=[1])[0].tokens == BLOCK + 1
    router.forget()
    assert router.place(follow, [1], among=[1])[0].tokens == 3 * BLOCK + 2 + 1


# ---------------------------------------------------------------------- requests

Answering = Callable[[httpx.Request], Any]


class Servers:
    """Servers that are functions, and what they were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: Answering) -> None:
        async def answer(request: httpx.Request) -> httpx.Response:
            name = request.url.host
            self.asked[name].append(json.loads(request.content)["sampling_params"]["seed"])
            told = answers[name](request)
            return await told if asyncio.iscoroutine(told) else told

        self.asked: dict[str, list[int]] = {name: [] for name in answers}
        self.failed: dict[int, str] = {}
        plain = partial(httpx.AsyncClient, transport=httpx.MockTransport(answer))
        monkeypatch.setattr(httpx, "AsyncClient", plain)
        clients = {
            number: ServerClient(f"http://{name}", "token") for number, name in enumerate(answers)
        }
        self.targets = Targets(
            clients,
            {number: f"model-{number}" for number in clients},
            Router(clients),
            lambda number, failure: self.failed.setdefault(number, str(failure)),
            {"new": 7, "old": 5},
        )

    def respond(self, prompts: list[list[int]], **options: Any) -> list[Response]:
        bodies = [
            {"token_ids": prompt, "sampling_params": {"seed": seed, "max_tokens": 10}}
            for seed, prompt in enumerate(prompts)
        ]
        return respond(bodies, self.targets, **{"concurrency": 4, "stall": 10.0, **options})


def answer_to(request: httpx.Request, **changes: Any) -> httpx.Response:
    """Answers a prompt with its own tokens plus 100."""
    prompt = json.loads(request.content)["token_ids"]
    tokens = [token + 100 for token in prompt]
    choice = {
        "token_ids": tokens,
        "logprobs": {"content": [{"logprob": -0.5, "token_id": token} for token in tokens]},
        "finish_reason": "stop",
        "weight_versions": [{"version": "new", "start": 0, "end": len(tokens)}],
    }
    body = {"prompt_token_ids": prompt, "choices": [choice]}
    for name, value in changes.items():
        (body if name in body else choice)[name] = value
    return httpx.Response(200, json=body)


def slowly(request: httpx.Request, seconds: float = 0.3) -> Any:
    async def answer() -> httpx.Response:
        await asyncio.sleep(seconds)
        return answer_to(request)

    return answer()


def refuse(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


PROMPTS = [[1, 2], [3], [4, 5, 6], [7], [8], [9]]
ANSWERS = [[token + 100 for token in prompt] for prompt in PROMPTS]


def ids(responses: list[Response]) -> list[list[int]]:
    return [response.token_ids.tolist() for response in responses]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_token_ids": [1]}, "answered another prompt"),
        ({"finish_reason": "abort"}, "broke a response off"),
        ({"logprobs": {"content": []}}, "broke a response off"),
        ({"logprobs": None}, "answer cannot be read"),
        ({"weight_versions": None}, "not say of every token"),
        ({"weight_versions": [{"version": "new", "start": 0, "end": 1}]}, "not say of every token"),
        ({"weight_versions": [{"version": "x", "start": 0, "end": 2}]}, "other weights than it wa"),
    ],
)
def test_an_answer_that_does_not_fit_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    servers = Servers(monkeypatch, only=lambda request: answer_to(request, **changes))
    with pytest.raises(EngineFailure, match=message):
        servers.respond([[1, 2]])
    assert message in servers.failed[0]


def test_what_weights_sampled_a_token_is_told_and_what_is_no_number_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans = [{"version": "old", "start": 0, "end": 2}, {"version": "new", "start": 2, "end": 3}]
    logprobs = {"content": [{"logprob": -0.5}, {"logprob": -9999.0}, {"logprob": -1.5}]}
    servers = Servers(
        monkeypatch,
        only=lambda request: (
            answer_to(request, weight_versions=spans, logprobs=logprobs)
            if len(json.loads(request.content)["token_ids"]) == 3
            else answer_to(request)
        ),
    )
    mixed, plain = servers.respond([[1, 2, 3], [4, 5]])
    assert mixed.weight_version == 5
    assert mixed.segments[0].versions is not None
    assert mixed.segments[0].versions.tolist() == [5, 5, 7]
    assert mixed.segments[0].logprobs is not None
    first, second, third = mixed.segments[0].logprobs.tolist()
    assert (first, math.isnan(second), third) == (-0.5, True, -1.5)
    assert (plain.weight_version, plain.segments[0].versions) == (7, None)


def test_responses_come_in_order_and_no_more_are_open_than_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened, most = 0, 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal opened, most
        opened += 1
        most = max(most, opened)
        # each 0.3 s: one after the other longer than the stall timeout, which starts anew
        await asyncio.sleep(0.3)
        opened -= 1
        return answer_to(request)

    servers = Servers(monkeypatch, only=answer)
    assert ids(servers.respond(PROMPTS, stall=0.5)) == ANSWERS
    assert most == 4


def test_a_group_stays_together_and_groups_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(monkeypatch, left=slowly, right=slowly)
    prompts = [[1], [1], [1], [2], [2], [2], [3], [3], [3], [4], [4], [4]]
    servers.respond(prompts, concurrency=6)
    groups = {name: Counter(seed // 3 for seed in asked) for name, asked in servers.asked.items()}
    assert groups == {"left": {0: 3, 2: 3}, "right": {1: 3, 3: 3}}
    # each by its own name of the model
    assert servers.targets.models == {0: "model-0", 1: "model-1"}


@pytest.mark.parametrize("fault", ["gone", "breaks off", "hangs"])
def test_what_a_replica_leaves_unfinished_goes_to_the_others(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def bad(request: httpx.Request) -> Any:
        if fault == "gone":
            return refuse(request)
        if fault == "breaks off":
            return answer_to(request, finish_reason="abort")
        # the first is answered, and nothing after it
        return slowly(request, 0.0 if json.loads(request.content)["token_ids"] == [1, 2] else 60.0)

    servers = Servers(monkeypatch, bad=bad, good=partial(slowly, seconds=0.1))
    started = time.monotonic()
    responses = servers.respond(PROMPTS, stall=0.5, concurrency=2)
    assert ids(responses) == ANSWERS
    assert time.monotonic() - started < 10.0
    assert list(servers.failed) == [0]
    left = {"gone": "did not answer", "hangs": "finished no response in 0.5 s"}
    assert left.get(fault, "broke a response off") in servers.failed[0]
    # what was finished is not asked for again
    again = {"hangs": {1, 2, 3, 4, 5}}.get(fault, set(range(6)))
    assert set(servers.asked["good"]) == again
    assert len(servers.asked["good"]) == len(again)


def test_without_a_replica_that_works_the_last_failure_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = Servers(monkeypatch, one=refuse, two=refuse)
    with pytest.raises(EngineFailure, match=r"did not answer /inference/v1/generate \(ConnectErr"):
        servers.respond(PROMPTS)
    assert sorted(servers.failed) == [0, 1]


def test_a_request_that_is_refused_is_nobodys_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(
        monkeypatch, one=lambda _: httpx.Response(400, text="too long"), two=partial(slowly)
    )
    with pytest.raises(ValueError, match="refused /inference/v1/generate: too long"):
        servers.respond(PROMPTS)
    assert not servers.failed


# ---------------------------------------------------------------------- servers


class Fake(Server):
    """Starts when it is told to."""

    def __init__(self, number: int) -> None:
        self.number, self.starts, self.stops = number, 0, 0
        self.may_start, self.fails, self.runs = threading.Event(), False, False
        self.may_start.set()

    def start(self) -> ServerClient:
        assert self.may_start.wait(20)
        self.starts += 1
        if self.fails:
            raise EngineStartError("no luck")
        self.runs = True
        client = ServerClient(f"http://{self.number}:{self.starts}", "token")
        client.is_healthy = lambda **_: self.runs  # type: ignore[method-assign]
        return client

    def stop(self) -> None:
        self.runs = False
        self.stops += 1
        self.may_start.set()

    def alive(self) -> bool:
        return self.runs


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[Fake]:
    monkeypatch.setattr("lrlhf.rollout.vllm.fleet._NOTICE_SECONDS", 0.3)
    return [Fake(0), Fake(1)]


def started(fakes: list[Fake], *, max_restarts: int = 2) -> Fleet:
    fleet = Fleet(fakes, max_restarts=max_restarts)
    fleet.start()
    return fleet


def urls(fleet: Fleet) -> dict[int, str]:
    return {number: client.url for number, client in fleet.running().items()}


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_server_that_failed_joins_once_it_runs_again(
    fakes: list[Fake], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = started(fakes)
    assert urls(fleet) == {0: "http://0:1", 1: "http://1:1"}
    fakes[1].may_start.clear()
    with caplog.at_level(logging.WARNING):
        fleet.fail(1, "broke a response off")
        fleet.fail(1, "as another request says")
    assert caplog.messages == [
        "vLLM server 1 broke a response off; it is started again while the others go on"
    ]
    assert (urls(fleet), fleet.restarts) == ({0: "http://0:1"}, 1)  # nobody waits for it
    fakes[1].may_start.set()
    eventually(lambda: len(urls(fleet)) == 2)
    assert urls(fleet)[1] == "http://1:2"
    # one that ended unnoticed is noticed when it is asked for
    fakes[0].may_start.clear()
    fakes[0].runs = False
    assert (urls(fleet), fleet.restarts) == ({1: "http://1:2"}, 2)
    fleet.stop()
    assert not fakes[0].runs
    assert not fakes[1].runs


def test_a_server_that_fails_again_and_again_is_left_out(
    fakes: list[Fake], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = started(fakes)
    fakes[1].fails = True
    fleet.fail(1, "has ended")
    eventually(lambda: urls(fleet) == {0: "http://0:1"} and "left out" in caplog.text)
    assert fakes[1].starts == 3  # and twice in a row again
    assert "did not start (no luck); it is left out, after 2 restarts in a row" in caplog.text
    # those that a push has reached since begin to count anew
    fleet.succeeded()
    fakes[0].runs = False
    with pytest.raises(EngineFailure, match="no vLLM server is left: vLLM server 0 has ended"):
        fleet.running()
    assert fakes[0].starts == 1  # that is for the engine to do
    fleet.stop()


def test_a_push_waits_only_where_no_server_is_left(fakes: list[Fake]) -> None:
    fleet = started(fakes)
    fakes[1].may_start.clear()
    fleet.fail(1, "has ended")
    fakes[0].runs = False
    threading.Timer(0.3, fakes[1].may_start.set).start()
    assert urls(fleet) == {1: "http://1:2"}
    fleet.stop()


def test_of_those_that_broke_a_push_off_the_ones_that_do_not_answer_are_dropped(
    fakes: list[Fake],
) -> None:
    fleet = started(fakes)
    assert fleet.drop_broken() == []
    fakes[1].may_start.clear()
    threading.Timer(0.1, setattr, [fakes[1], "runs", False]).start()  # as it is noticed
    assert fleet.drop_broken() == [1]
    # the last one may have nothing worse than other weights, which a push mends
    fleet.fail(0, "has other weights")
    assert urls(fleet) == {0: "http://0:1"}
    fakes[0].runs = False
    assert fleet.drop_broken() == []  # nobody is left who could go on
    fleet.stop()


def test_a_server_that_does_not_start_at_first_ends_the_others(fakes: list[Fake]) -> None:
    fakes[1].fails = True
    fleet = Fleet(fakes, max_restarts=2)
    with pytest.raises(EngineStartError, match="no luck"):
        fleet.start()
    assert fakes[0].runs
    fleet.stop()
    assert not fakes[0].runs
