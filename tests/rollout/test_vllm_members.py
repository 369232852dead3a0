"""Servers, which are functions, come and go while an engine pushes and others ask it."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.background import in_background
from lrlhf.rollout import EngineFailure, Sampling, VLLMServerEngine, WeightSyncError
from lrlhf.rollout.engines.synced_engine import without_recovery
from lrlhf.rollout.responses import token_prompts
from lrlhf.rollout.vllm.client import GENERATE
from lrlhf.rollout.vllm.servers import Fleet, Server
from lrlhf.rollout.vllm.vllm_base import EngineStartError
from lrlhf.vllm_worker.fingerprint import as_text
from tests.conftest import build_language_model
from tests.rollout.test_vllm_fleet import Fake, eventually
from tests.rollout.test_vllm_launching import DESCRIBED

LIVES = "lrlhf.rollout.vllm"


class Network:
    """What all servers answer, and the trainer's end of the transfers to them."""

    def __init__(self) -> None:
        self.version = ""
        self.arrived: dict[str, str] = {}
        self.asked: list[str] = []
        self.during_push: list[Callable[[Any], None]] = []
        self.transfers: list[Any] = []
        self.afresh: list[bool] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content or b"{}")
        if path == "/collective_rpc":
            told: dict[str, Any] = {
                "lrlhf_describe": DESCRIBED | {"workers": 1},
                "lrlhf_await_trainer": None,
                "lrlhf_arrived": self.arrived,
            }
            return httpx.Response(200, json={"results": [told[body["method"]]]})
        if path == GENERATE:
            self.asked.append(f"{request.url.host}:{request.url.port}")
            choice = {
                "token_ids": [5],
                "logprobs": {"content": [{"logprob": -0.5}]},
                "finish_reason": "length",
                "weight_versions": [{"version": self.version, "start": 0, "end": 1}],
            }
            told = {"prompt_token_ids": body["token_ids"], "choices": [choice]}
            return httpx.Response(200, json=told)
        return httpx.Response(200, json={"success": True})

    def connect(self, _: str, members: list[Any], *__: Any, **___: Any) -> Any:
        transfer = SimpleNamespace(members=members, failed=[], close=list)
        transfer.push = partial(self.push, transfer)
        self.transfers.append(transfer)
        return transfer

    def push(self, transfer: Any, tensors: Any, version: str, *, afresh: bool, **_: Any) -> None:
        self.afresh.append(afresh)
        if self.during_push:
            self.during_push.pop(0)(transfer)
        for _tensor in tensors:
            pass
        self.arrived, self.version = as_text(tensors.seen), version


class Engine(VLLMServerEngine):
    """Two servers that are functions."""

    def __init__(self) -> None:
        super().__init__(replicas=2)
        self.fakes = [Fake(0), Fake(1)]

    def _new_server(self, number: int) -> Server:
        return self.fakes[number]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network()
    transport = httpx.MockTransport(network.answer)
    for name in ("Client", "AsyncClient"):
        monkeypatch.setattr(httpx, name, partial(getattr(httpx, name), transport=transport))
    ends = SimpleNamespace(
        Member=lambda client, workers: SimpleNamespace(client=client, workers=workers),
        WeightTransfer=network.connect,
    )
    monkeypatch.setattr(f"{LIVES}.server_engine.import_transfer", lambda: ends)
    monkeypatch.setattr(f"{LIVES}.servers._NOTICE_SECONDS", 0.3)
    return network


@pytest.fixture
def engine(network: Network, tokenizer: PreTrainedTokenizerBase) -> Iterator[Engine]:
    """Two servers with weights, and updates in flight."""
    del network
    engine = Engine()
    policy: PreTrainedModel = build_language_model(tokenizer)
    engine.attach(policy, tokenizer)
    engine.allow_updates_in_flight(True)
    engine.push(0)
    yield engine
    engine.close()


def ask(engine: Engine) -> list[int]:
    """Ask as a thread does that runs beside training; returns what weights answered."""
    with without_recovery():
        rollout = engine.generate(
            token_prompts([[7, 8]]), Sampling(max_new_tokens=1), num_generations=1, seeds=[0]
        )
    assert rollout.weight_version is not None
    found: list[int] = rollout.weight_version.tolist()
    return found


def starts(engine: Engine) -> list[int]:
    return [one.starts for one in engine.fakes]


def test_a_push_goes_on_without_a_server_that_requests_saw_die_in_it(
    engine: Engine, network: Network
) -> None:
    def dies(_: Any) -> None:
        engine.fakes[1].may_start.clear()
        note(1, EngineFailure("gone"))
        raise EngineFailure("the connection broke")

    assert engine._targets is not None
    note, first = engine._targets.on_failure, engine._replicas[0]
    network.during_push.append(dies)
    engine.push(1)
    assert starts(engine) == [1, 1]  # the second is about to be, beside the other
    assert engine.restarts == 1
    # what is known of the other, such as its adapter, is kept
    assert engine._replicas == [first]
    assert engine._replicas[0] is first
    assert ask(engine) == [1]
    assert network.asked == ["0:1"]


def test_changes_alone_are_sent_only_after_a_push_that_is_known_to_have_arrived(
    engine: Engine, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pushed(version: int) -> list[bool]:
        """Push, and return how each attempt began."""
        network.afresh.clear()
        engine.push(version)
        return network.afresh

    def fails(error: Exception) -> Callable[..., None]:
        def fail(*_: Any) -> None:
            raise error

        return fail

    assert network.afresh == [True]
    assert pushed(1) == [False]
    engine.outdate()  # as a resume does
    assert pushed(2) == [True]
    assert pushed(3) == [False]
    network.during_push.append(fails(EngineFailure("the connection broke")))
    assert pushed(4) == [False, True]
    with monkeypatch.context() as patch:
        mismatch = fails(WeightSyncError("other values"))
        patch.setattr("lrlhf.rollout.engines.synced_engine.compare_fingerprints", mismatch)
        with pytest.raises(WeightSyncError):
            engine.push(5)
    assert pushed(6) == [True]
    assert pushed(7) == [False]


def test_a_server_that_hung_in_a_push_does_not_end_the_other(
    engine: Engine, network: Network
) -> None:
    def hangs(transfer: Any) -> None:
        transfer.failed.append(transfer.members[1].client)
        raise EngineFailure("no answer to /pause")

    network.during_push.append(hangs)
    engine.push(1)  # it answers whoever asks for its health
    assert starts(engine)[0] == 1
    eventually(lambda: starts(engine)[1] == 2)


def test_a_server_that_does_not_finish_a_push_does_not_end_the_other(
    engine: Engine, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/resume" and str(request.url.host) == "1":
            return httpx.Response(500, text="out of memory")
        return network_answer(request)

    network_answer = network.answer
    engine.fakes[1].may_start.clear()
    transport = engine._replicas[1].client._http._transport
    monkeypatch.setattr(transport, "handler", answer)
    engine.push(1)
    assert starts(engine) == [1, 1]
    assert [one.number for one in engine._replicas] == [0]


def joining(engine: Engine, answer: Callable[[], httpx.Response]) -> None:
    """Push with the second server started anew, whose workers answer so when they are described."""
    assert engine._targets is not None
    engine._targets.on_failure(1, EngineFailure("gone"))
    eventually(lambda: len(engine._main_fleet.running()) == 2)
    transport: Any = engine._replicas[0].client._http._transport  # of all of them
    before = transport.handler

    def answers(request: httpx.Request) -> httpx.Response:
        asked = b"lrlhf_describe" in request.content and request.url.port == 2
        return answer() if asked and request.url.host == "1" else before(request)

    transport.handler = answers
    engine.push(1)


def test_workers_that_hang_behind_a_healthy_server_are_started_again(engine: Engine) -> None:
    def hang() -> httpx.Response:
        raise httpx.ReadTimeout("timed out")

    joining(engine, hang)
    assert ask(engine) == [1]
    eventually(lambda: starts(engine) == [1, 3])


@pytest.mark.parametrize("status", [404, 500])
def test_a_server_whose_workers_cannot_take_weights_says_how_to_start_it(
    engine: Engine, status: int
) -> None:
    with pytest.raises(EngineStartError, match=f"cannot take weights .*answered .* {status}: no"):
        joining(engine, lambda: httpx.Response(status, text="no such method"))


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_and_not_called_unable(engine: Engine, status: int) -> None:
    joining(engine, lambda: httpx.Response(status, text="too many requests"))
    assert ask(engine) == [1]
    eventually(lambda: starts(engine) == [1, 3])


def test_requests_go_to_those_with_weights_while_others_join(
    engine: Engine, network: Network
) -> None:
    def asks(_: Any) -> None:
        assert [one.client.url for one in engine._replicas] == ["http://0:1", "http://1:2"]
        for _number in range(4):
            found.append(in_background(partial(ask, engine), name="turn").result(timeout=20))

    found: list[list[int]] = []
    assert engine._targets is not None
    engine._targets.on_failure(1, EngineFailure("gone"))
    eventually(lambda: len(engine._main_fleet.running()) == 2)
    network.during_push.append(asks)
    engine.push(1)
    assert found == [[0]] * 4
    assert set(network.asked) == {"0:1"}
    assert engine._targets.clients.keys() == {0, 1}
    assert ask(engine) == [1]


def test_what_failed_in_an_old_life_says_nothing_of_the_servers_of_the_next(engine: Engine) -> None:
    old = engine._targets
    assert old is not None
    engine.close()
    engine.push(1)
    assert starts(engine) == [2, 2]
    old.on_failure(1, EngineFailure("closed"))
    assert not engine._failed
    engine.push(2)
    assert starts(engine) == [2, 2]
    assert len(engine._replicas) == 2


def test_without_weights_a_thread_beside_training_hears_of_a_failure(engine: Engine) -> None:
    engine.outdate()
    with pytest.raises(EngineFailure, match="Engine has no weights at the moment"):
        ask(engine)
    engine.push(1)
    engine._targets = None  # as it ends in another thread
    with pytest.raises(EngineFailure, match="no vLLM server has the policy's weights"):
        ask(engine)


def test_ranks_hear_of_one_that_did_not_connect_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise EngineFailure("no connection")

    def worst(trouble: int) -> int:
        votes.append(trouble)
        return trouble

    votes: list[int] = []
    monkeypatch.setattr(engine, "_worst_of_ranks", worst)
    monkeypatch.setattr(engine, "_update_members", fails)
    with pytest.raises(EngineFailure, match="no connection"):
        engine._start_together()
    assert votes == [1]
    monkeypatch.setattr(engine, "_worst_of_ranks", lambda _: 1)
    monkeypatch.setattr(engine, "_update_members", list)
    with pytest.raises(EngineFailure, match="another rank did not connect"):
        engine._start_together()


def test_every_rank_counts_the_restarts_of_a_new_fleet_from_none(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.close()
    before = engine.restarts
    engine._counted_restarts = 3
    engine._fleet = Fleet(engine.fakes, max_restarts=2)  # as rank 0 has it
    monkeypatch.setattr(f"{LIVES}.server_engine.is_main_rank", lambda: False)
    monkeypatch.setattr(f"{LIVES}.server_engine.on_main_rank", lambda act: act())
    engine._start()
    assert (engine._counted_restarts, engine.restarts) == (0, before)
    engine._running = True


def test_as_many_connections_as_may_be_are_allowed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(f"{LIVES}.server_engine.resource.getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(
        f"{LIVES}.server_engine.resource.setrlimit", lambda _, both: limits.append(both)
    )
    engine.close()
    engine.push(1)
    assert limits == [(4096, 4096)]
