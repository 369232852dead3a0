"""Faults of a reward service that a run asks over HTTP: see faults_table.csv."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest

from tests.faults.faults_table_runs import STEPS, Ended, Run, Table, assert_intact
from tests.rewards.reward_server import Server, hangs, says, sends, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("_own_log"),
    pytest.mark.filterwarnings("ignore:.*"),
]


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as started:
        yield started


def asks(run: Run, server: Server, **options: Any) -> None:
    """Have the run ask a service: quick to give up, and to stop when all fails."""
    settings = {"first_pause": 0.01, "retries": 1, "timeout": 2.0, "breaker_cooldown": 0.1}
    function = {
        "class_path": "lrlhf.rewards.RemoteReward",
        "init_args": {"urls": server.url, **settings, **options},
    }
    run.config["model"]["init_args"]["rewards"]["init_args"] = {"functions": [function]}


def starts(server: Server, act: Any) -> Callable[[L.Trainer], None]:
    return lambda _: setattr(server, "always", act)


def lost(run: Run, ended: Ended, table: Table, server: Server, *culprits: str) -> None:
    assert_intact(run, 2)
    table.stopped(ended, server.url, *culprits)


def test_service_answers_500_once(run: Run, table: Table, server: Server) -> None:
    asks(run, server)
    ended = run.fit(step_2=lambda _: server.script.append(says({"detail": "oh"}, 500)))
    assert ended.status == 0, ended.err
    assert_intact(run, STEPS)
    assert not [record for record in run.records() if record["score"] is None]
    table.recovered("asked again: every response has its score")


def test_service_answers_500(run: Run, table: Table, server: Server) -> None:
    asks(run, server)
    ended = run.fit(step_2=starts(server, says({"detail": "out of memory"}, 500)))
    lost(run, ended, table, server, "500")


def test_service_is_gone(run: Run, table: Table, server: Server) -> None:
    asks(run, server)

    def close(_: L.Trainer) -> None:
        server.shutdown()
        server.socket.close()
        server.always = hangs_up_now

    ended = run.fit(step_2=close)
    lost(run, ended, table, server)


def hangs_up_now(handler: Any) -> None:
    handler.close_connection = True


def test_service_sends_rubbish(run: Run, table: Table, server: Server) -> None:
    asks(run, server)
    ended = run.fit(step_2=starts(server, sends(b"<html>busy</html>")))
    lost(run, ended, table, server, "JSON")


def test_service_sends_too_few_scores(run: Run, table: Table, server: Server) -> None:
    asks(run, server)
    few = says({"scores": [1.0], "model": "fake", "version": "v1"})
    ended = run.fit(step_2=starts(server, few))
    lost(run, ended, table, server)


def test_service_hangs(run: Run, table: Table, server: Server) -> None:
    asks(run, server, timeout=0.2)
    ended = run.fit(step_2=starts(server, hangs))
    lost(run, ended, table, server)


def test_service_refuses_the_token(
    run: Run, table: Table, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "LRLHF_REWARD_TOKEN", "t0ken-of-the-test")
    asks(run, server)
    ended = run.fit(step_2=starts(server, says({"detail": "wrong token"}, 401)))
    assert "t0ken-of-the-test" not in ended.err + ended.out
    lost(run, ended, table, server, "401", "wrong token")
