"""Where requests go, and what becomes of those of a replica that fails."""

import asyncio
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest

from lrlhf.background import in_background
from lrlhf.rollout import EngineFailure
from lrlhf.rollout.responses import Response
from lrlhf.rollout.vllm.client import ServerClient
from lrlhf.rollout.vllm.dispatch import BLOCK, Router, Targets, TokenRequest, Traffic, respond

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
        self.failed_at: dict[tuple[str, str], str] = {}
        plain = partial(httpx.AsyncClient, transport=httpx.MockTransport(answer))
        monkeypatch.setattr(httpx, "AsyncClient", plain)
        clients = {
            number: ServerClient(f"http://{name}", "token") for number, name in enumerate(answers)
        }
        self.targets = Targets(
            clients,
            {number: f"model-{number}" for number in clients},
            Router(clients),
            self.note,
            {"new": 7, "old": 5},
            self.failed_at,
        )

    def note(self, number: int, failure: EngineFailure) -> None:
        self.failed.setdefault(number, str(failure))
        self.failed_at[self.targets.clients[number].address] = str(failure)

    def respond(self, prompts: list[list[int]], **options: Any) -> list[Response]:
        requests = [
            TokenRequest(prompt, {"seed": seed, "max_tokens": 10}, prompt, tuple(prompt))
            for seed, prompt in enumerate(prompts)
        ]
        return respond(requests, self.targets, **{"concurrency": 4, "stall": 10.0, **options})


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
        ({"token_ids": [], "logprobs": {"content": []}, "weight_versions": []}, "without a token"),
        ({"weight_versions": None}, "version of every token"),
        ({"weight_versions": [{"version": "new", "start": 0, "end": 1}]}, "version of every token"),
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
        # each 0.8 s: one after the other longer than the stall timeout, which starts anew
        await asyncio.sleep(0.8)
        opened -= 1
        return answer_to(request)

    servers = Servers(monkeypatch, only=answer)
    assert ids(servers.respond(PROMPTS, stall=1.5)) == ANSWERS
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
    responses = servers.respond(PROMPTS, stall=3.0, concurrency=2)
    assert ids(responses) == ANSWERS
    assert time.monotonic() - started < 30.0
    assert list(servers.failed) == [0]
    left = {"gone": "did not answer", "hangs": "finished no response in 3 s"}
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


def test_calls_share_the_places_of_a_server_and_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[int] = []
    opened, most = 0, 0

    async def in_turn(request: httpx.Request) -> httpx.Response:
        nonlocal opened, most
        opened, most = opened + 1, max(most, opened + 1)
        token = json.loads(request.content)["token_ids"][0]
        arrived.append(token)
        turn = len(arrived)
        while turn > finished[0] + 1 or not all_wait.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        finished[0] += 1
        opened -= 1
        return answer_to(request)

    finished, all_wait = [0], threading.Event()
    servers = Servers(monkeypatch, only=in_turn)
    prompts = [[[10 * call + index] for index in range(8)] for call in (1, 2, 3)]
    calls = []
    for one in prompts:
        respond_to = partial(servers.respond, one, stall=1.5, concurrency=4)
        calls.append(in_background(respond_to, name="call"))
        deadline = time.monotonic() + 20
        while len(servers.targets.traffic._waiting) < len(calls):  # so that it is the next one
            assert time.monotonic() < deadline
            time.sleep(0.01)
    all_wait.set()
    # any two calls are answered for longer than the stall timeout
    found = [ids(call.result()) for call in calls]
    assert found == [[[token + 100] for (token,) in one] for one in prompts]
    assert most == 4
    # first come, first served
    assert arrived == [token for one in prompts for (token,) in one]
    assert not servers.failed


def test_what_waits_goes_to_no_server_that_failed_another_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = Servers(monkeypatch, hung=lambda request: slowly(request, 60.0))
    calls = [
        in_background(partial(servers.respond, [[1]], stall=2.0, concurrency=1), name="call")
        for _ in range(2)
    ]
    started = time.monotonic()
    for call in calls:
        with pytest.raises(EngineFailure, match=r"finished no response in 2 s"):
            call.result()
    assert time.monotonic() - started < 3.9  # it is not given its time once more
    assert len(servers.asked["hung"]) == 1


def test_places_are_given_first_come_first_served() -> None:
    traffic = Traffic()
    woken: list[str] = []
    server = ServerClient("http://only", "token")
    first, second = traffic.enter(), traffic.enter()
    assert traffic.may_place(second, partial(woken.append, "second"))  # nobody else waits
    assert traffic.may_place(first, partial(woken.append, "first"))
    assert not traffic.may_place(second, partial(woken.append, "second"))
    traffic.opened(server, 2)
    assert (traffic.has_slot(server, 2), traffic.has_slot(server, 3)) == (False, True)
    traffic.closed(server, answered=True)
    assert (traffic.has_slot(server, 2), woken) == (True, ["first"])
    traffic.placed(first)  # it is the turn of the next
    assert woken == ["first", "second"]
    assert traffic.may_place(second, partial(woken.append, "second"))


def test_a_server_returns_what_truncated_sampling_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def top(**logprobs: float) -> list[dict[str, float]]:
        return [{"token_id": int(key[1:]), "logprob": each} for key, each in logprobs.items()]

    content = [
        {
            "token_id": 101,
            "logprob": -1.6094379,
            "top_logprobs": top(t101=-1.6094379, t8=-0.2231436),
        },
        # JSON has no infinity: what was cut off
        {"token_id": 102, "logprob": 0.0, "top_logprobs": top(t102=0.0, t3=-9999.0)},
    ]
    only = partial(answer_to, logprobs={"content": content})
    servers = Servers(monkeypatch, only=lambda request: only(request))
    parameters = {"seed": 0, "max_tokens": 10, "logprobs": 34}
    (response,) = respond(
        [TokenRequest([1, 2], parameters, [1, 2], (1, 2))],
        servers.targets,
        concurrency=4,
        stall=10.0,
    )
    mask = response.segments[0].mask
    assert mask is not None
    assert (mask.sizes.tolist(), mask.ids.tolist()) == ([[2, 1]], [8, 101, 102])
    (plain,) = servers.respond([[1, 2]])
    assert plain.segments[0].mask is None
    content[0]["top_logprobs"] = top(t101=math.log(0.2))
    with pytest.raises(ValueError, match=r"a probability of 0\.200000 together"):
        respond(
            [TokenRequest([1, 2], parameters, [1, 2], (1, 2))],
            servers.targets,
            concurrency=4,
            stall=10.0,
        )
