"""Faults of a reward service that a run asks over HTTP: see faults_table.csv."""

import os
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest

from tests.faults.faults_table_runs import STEPS, Run, Table, assert_intact, case
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
    settings = {"retries": 1, "timeout": 2.0}
    function = {
        "class_path": "lrlhf.rewards.RemoteReward",
        "init_args": {"urls": server.url, **settings, **options},
    }
    run.config["model"]["init_args"]["rewards"]["init_args"] = {"functions": [function]}


def test_service_answers_500_once(run: Run, table: Table, server: Server) -> None:
    asks(run, server)
    ended = run.fit(step_2=lambda _: server.script.append(says({"detail": "oh"}, 500)))
    assert ended.status == 0, ended.err
    assert_intact(run, STEPS)
    assert not [record for record in run.records() if record["score"] is None]
    table.recovered("asked again: every response has its score")


def closes(handler: Any) -> None:
    handler.close_connection = True


FEW = says({"scores": [1.0], "model": "fake", "version": "v1"})
LOST = [
    case("service_answers_500", says({"detail": "out of memory"}, 500), "500", exhaustive=True),
    case("service_sends_rubbish", sends(b"<html>busy</html>"), "JSON", exhaustive=True),
    case("service_sends_too_few_scores", FEW, exhaustive=True),
    case("service_hangs", hangs, exhaustive=True),
    case("service_refuses_the_token", says({"detail": "wrong token"}, 401), "401", "wrong token"),
    case("service_is_gone", closes),
]


@pytest.mark.parametrize(("answer", "culprits"), LOST)
def test_a_service_is_lost(
    run: Run,
    table: Table,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    answer: Any,
    culprits: tuple[str, ...],
) -> None:
    monkeypatch.setitem(os.environ, "LRLHF_REWARD_TOKEN", "t0ken-of-the-test")
    asks(run, server, timeout=0.2 if answer is hangs else 2.0)

    def begin(_: L.Trainer) -> None:
        server.always = answer
        if answer is closes:
            server.shutdown()
            server.socket.close()

    ended = run.fit(step_2=begin)
    assert "t0ken-of-the-test" not in ended.err + ended.out
    assert_intact(run, 2)
    table.stopped(ended, server.url, *culprits)
