"""How servers are kept running."""

import logging
import threading
import time
from collections.abc import Callable

import pytest

from lrlhf.background import in_background
from lrlhf.rollout import EngineFailure
from lrlhf.rollout.vllm.client import ServerClient
from lrlhf.rollout.vllm.servers import ExternalServer, Fleet, Server
from lrlhf.rollout.vllm.vllm_base import EngineStartError


class Fake(Server):
    """Starts when it is told to."""

    def __init__(self, number: int) -> None:
        self.number, self.starts, self.stops = number, 0, 0
        self.may_start, self.fails, self.runs = threading.Event(), False, False
        self.may_start.set()
        self.client: ServerClient

    def start(self) -> ServerClient:
        assert self.may_start.wait(20)
        self.starts += 1
        if self.fails:
            raise EngineStartError("no luck")
        self.runs = True
        self.client = client = ServerClient(f"http://{self.number}:{self.starts}", "token")
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
    monkeypatch.setattr("lrlhf.rollout.vllm.servers._NOTICE_SECONDS", 0.3)
    return [Fake(0), Fake(1)]


def started(fakes: list[Fake], *, max_restarts: int = 2) -> Fleet:
    fleet = Fleet(fakes, max_restarts=max_restarts)
    fleet.start()
    return fleet


def urls(fleet: Fleet) -> dict[int, str]:
    return {number: client.url for number, client in fleet.running().items()}


def at(number: int, start: int = 1) -> tuple[str, str]:
    return f"http://{number}:{start}", "token"


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
        fleet.fail(at(1), "broke a response off")
        fleet.fail(at(1), "as another request says")
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
    fleet.fail(at(1), "has ended")
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
    fleet.fail(at(1), "has ended")
    fakes[0].runs = False
    fakes[0].may_start.clear()
    threading.Timer(0.3, fakes[1].may_start.set).start()
    assert urls(fleet) == {1: "http://1:2"}
    # the second to fail, when nobody else ran, is not lost either
    fakes[0].may_start.set()
    eventually(lambda: urls(fleet) == {0: "http://0:2", 1: "http://1:2"})
    fleet.stop()


def test_of_those_that_broke_a_push_off_the_ones_that_do_not_answer_are_dropped(
    fakes: list[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = started(fakes)
    assert fleet.drop_broken([0, 1]) == []
    fakes[1].may_start.clear()
    threading.Timer(0.1, setattr, [fakes[1], "runs", False]).start()  # as it is noticed
    with monkeypatch.context() as patched:
        patched.setattr("lrlhf.rollout.vllm.servers._NOTICE_SECONDS", 10.0)
        assert fleet.drop_broken([0, 1]) == [1]
    # the last one may have nothing worse than other weights, which a push mends
    fleet.fail(at(0), "has other weights")
    assert urls(fleet) == {0: "http://0:1"}
    fakes[0].runs = False
    assert fleet.drop_broken([0]) == []  # nobody is left who could go on
    fleet.stop()


def test_a_server_that_does_not_start_at_first_ends_the_others(fakes: list[Fake]) -> None:
    fakes[1].fails = True
    fleet = Fleet(fakes, max_restarts=2)
    with pytest.raises(EngineStartError, match="no luck"):
        fleet.start()
    assert fakes[0].runs
    fleet.stop()
    assert not fakes[0].runs


def test_what_failed_at_an_old_address_does_not_end_the_server_at_a_new_one(
    fakes: list[Fake],
) -> None:
    fleet = started(fakes)
    fleet.fail(at(1), "has ended")
    eventually(lambda: len(urls(fleet)) == 2)
    fleet.fail(at(1), "as a request says that was open for long")
    assert urls(fleet) == {0: "http://0:1", 1: "http://1:2"}
    fleet.stop()


def test_broken_are_also_those_that_others_took_out_and_those_that_broke_a_step_off(
    fakes: list[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lrlhf.rollout.vllm.servers._NOTICE_SECONDS", 10.0)
    fleet = started(fakes)
    fakes[1].may_start.clear()
    fleet.fail(at(1), "as a request says, meanwhile")
    before = time.monotonic()
    assert fleet.drop_broken([0, 1]) == [1]
    fakes[1].may_start.set()
    eventually(lambda: len(urls(fleet)) == 2)
    # its health is as it should be
    assert fleet.drop_broken([0, 1], [0]) == [0]
    assert time.monotonic() - before < 5.0
    assert fakes[0].runs
    eventually(lambda: urls(fleet) == {0: "http://0:2", 1: "http://1:2"})
    fleet.stop()


def test_a_fleet_may_change_while_it_is_looked_at(fakes: list[Fake]) -> None:
    fleet = started(fakes)
    healthy = fakes[0].client.is_healthy

    def looked_at(**options: float) -> bool:
        fleet.fail(at(1), "as a request says")
        return healthy(**options)

    fakes[0].client.is_healthy = looked_at  # type: ignore[method-assign]
    assert fleet.drop_broken([0, 1]) == [1]
    fleet.stop()
    closed = ServerClient("http://closed:1", "token")
    closed.close()
    assert not closed.is_healthy()


def test_nobody_waits_for_a_found_server_that_is_not_wanted_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "token")
    asked = threading.Event()

    def ill(*_: object, **__: object) -> bool:
        asked.set()
        return False

    monkeypatch.setattr(ServerClient, "is_healthy", ill)
    found = ExternalServer("http://nobody:1", timeout=900.0, command=str)
    start = in_background(found.start, name="start")
    assert asked.wait(20)
    found.stop()
    with pytest.raises(EngineStartError, match="not waited for any more"):
        start.result(timeout=20.0)
    monkeypatch.setattr(ServerClient, "is_healthy", lambda *_, **__: True)
    assert found.start().url == "http://nobody:1"  # by a later life of the engine
