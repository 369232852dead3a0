"""Parts of rollout replicas that need no cluster."""

import os
import socket
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lrlhf.apps.cluster.guarded_program import GuardedProgram
from lrlhf.apps.cluster.replicas import RayServer, RayServerEngine, ReplicaActor, adapted, portable
from lrlhf.rollout.vllm.vllm_base import EngineStartError


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_command_takes_its_model_and_address_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    command = ["python", "-m", "x", "--model", str(tmp_path), "--host", "127.0.0.1", "--port", "0"]
    sent, files = portable(command)
    assert files == {"config.json": b"{}"}
    assert adapted(sent, {"--model": "/there", "--host": "10.0.0.7", "--port": "81"}) == [
        *("python", "-m", "x", "--model", "/there", "--host", "10.0.0.7", "--port", "81")
    ]


def test_a_server_that_has_ended_says_on_which_node_its_log_is(tmp_path: Path) -> None:
    replica = ReplicaActor()
    replica._log = tmp_path / "log"
    program = [sys.executable, "-c", "raise SystemExit(7)"]
    replica._server = GuardedProgram(
        program, env=dict(os.environ), folder=tmp_path, log_file=replica._log
    )
    assert replica._server.wait(60) == 7
    told = f"it ended with status 7 (all of it is in {tmp_path}/log on {socket.gethostname()})"
    assert replica.ended() == told


def test_replicas_on_gpus_take_weights_by_nccl_and_the_gpus_that_ray_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lrlhf.apps.cluster.replicas.is_cpu", lambda: False)
    engine = RayServerEngine(replicas=2, visible_devices="6,7")
    assert engine._server_transport() == "nccl"
    assert [engine._devices(number) for number in range(2)] == [None, None]
    assert RayServerEngine(transport="gloo")._server_transport() == "gloo"


def test_a_replica_is_told_what_its_node_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    server = RayServer(
        0,
        command=lambda: [],
        environment=lambda token: {**os.environ, "VLLM_API_KEY": token, "OWN": "1"},
        timeout=1.0,
        explain=lambda reason: EngineStartError(reason),
    )
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    told = server._server_environment("secret")
    expected = {"VLLM_API_KEY": "secret", "OWN": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    assert {name: told[name] for name in expected} == expected
    assert not {"CUDA_VISIBLE_DEVICES", "PATH"} & told.keys()
    assert server.alive() is False
    server.stop()


def test_folders_that_dead_actors_left_are_removed_a_day_later() -> None:
    def age(folder: Path, seconds: float) -> None:
        then = time.time() - seconds
        for path in (*folder.iterdir(), folder):
            os.utime(path, (then, then))

    living, killed, failed = ReplicaActor(), ReplicaActor(), ReplicaActor()
    for replica in (killed, failed):
        replica._alive.release()  # as the end of a process does
    failed._log.write_text("why it failed")
    folders = [one._folder for one in (living, killed, failed)]
    for folder in folders:
        age(folder, 90_000)
    ReplicaActor()
    assert [folder.exists() for folder in folders] == [True, False, False]


def test_what_a_server_wrote_lately_stays() -> None:
    replica = ReplicaActor()
    replica._alive.release()
    day_ago = time.time() - 90_000
    replica._log.write_text("why it failed")
    os.utime(replica._folder, (day_ago, day_ago))
    ReplicaActor()
    assert replica._log.read_text() == "why it failed"
