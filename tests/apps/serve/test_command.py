"""`lrlhf serve-reward`: its options, and a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from lrlhf.apps.serve import QueueOptions, RequestLimits, check_exposure, read_token
from lrlhf.apps.serve.serve_reward_command import serve_reward
from lrlhf.cli import run
from lrlhf.rewards import LengthPenalty
from tests.apps.serve.conftest import Scores, folder_config


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LRLHF_REWARD_TOKEN", raising=False)


@pytest.mark.parametrize(
    ("values", "flags", "message"),
    [
        (
            {},
            ["--reward", "tests.apps.serve.test_command.letterz"],
            "module 'tests.apps.serve.test_command' has no attribute 'letterz'; did you mean "
            "'letters'?\n",
        ),
        ({}, [], "error: give model.source or reward, one of the two; neither was given\n"),
        (
            {"model": {"source": "x", "batch_size": 0}},
            [],
            "error: serve.yaml:4: model.batch_size: batch_size is 0; it must be above 0\n",
        ),
        (
            {"model": {"source": "x"}},
            ["--host", "0.0.0.0"],
            "error: command line: --host: host is '0.0.0.0', so that other machines reach the "
            "service, and it has no token: set the environment variable LRLHF_REWARD_TOKEN, or "
            "token_file, or take 127.0.0.1\n",
        ),
        (
            {"model": {"source": "x"}, "token_file": "missing"},
            [],
            "token_file 'missing' cannot be read: FileNotFoundError\n",
        ),
    ],
)
def test_mistakes_are_explained_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    values: dict[str, Any],
    flags: list[str],
    message: str,
) -> None:
    folder_config(tmp_path, **values)
    assert run(["serve-reward", "--config", "serve.yaml", *flags]) == 2
    error = capsys.readouterr().err
    assert error.endswith(message), error
    assert error.count("\n") == 1


def letters(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


@pytest.mark.parametrize(
    "flags",
    [
        ["--reward", "tests.apps.serve.test_command.letters"],
        ["--reward.class_path", "LengthPenalty", "--reward.init_args.target", "5"],
    ],
)
def test_functions_and_classes_are_served(
    flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []
    monkeypatch.setattr("lrlhf.apps.serve.Scorer", lambda function, name: served.append(function))
    monkeypatch.setattr("lrlhf.apps.serve.RewardService", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        serve_reward(flags)
    assert served == [flags[1]] or isinstance(served[0], LengthPenalty)


def test_the_config_of_the_repository_parses_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[3] / "configs" / "serve_reward.yaml"
    assert run(["serve-reward", "--config", str(path), "--print_config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["model"]["source"] == "runs/reward_text/export/final"
    assert (shown["host"], shown["port"]) == ("127.0.0.1", 8100)


def test_a_port_that_is_taken_ends_the_command(
    text_reward: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert run(["serve-reward", "--model.source", text_reward, "--port", str(port)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: cannot listen at 127.0.0.1, port {port}: ")


def test_without_a_token_only_the_own_machine_is_served() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        check_exposure(host, None)
    for host in ("0.0.0.0", "", "a.name"):
        check_exposure(host, "token")
        with pytest.raises(ValueError, match=r"host is .* no token"):
            check_exposure(host, None)


def test_tokens_come_from_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_token("LRLHF_REWARD_TOKEN", None) is None
    monkeypatch.setenv("LRLHF_REWARD_TOKEN", "of-the-environment")
    assert read_token("LRLHF_REWARD_TOKEN", None) == "of-the-environment"
    (tmp_path / "token").write_text("of-the-file\n")
    assert read_token("LRLHF_REWARD_TOKEN", "token") == "of-the-file"
    for secret in ("two words", "", "zwölf", "one\ntwo"):
        (tmp_path / "token").write_text(secret)
        with pytest.raises(ValueError, match="a token is one line") as refused:
            read_token("LRLHF_REWARD_TOKEN", "token")
        assert not secret or secret not in str(refused.value)


@pytest.mark.parametrize("options", [RequestLimits, QueueOptions])
def test_limits_are_above_zero(options: Any) -> None:
    for field in options.__dataclass_fields__:
        for value in (0, -1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=f"^{field} is "):
                options(**{field: value})


@pytest.fixture
def process(tmp_path: Path, text_reward: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, and its address."""
    values = {"model": {"source": text_reward}, "port": 0, "max_request_mb": 2, "timeout_s": 30}
    folder_config(tmp_path, **values)
    command = [sys.executable, "-m", "lrlhf", "serve-reward", "--config", "serve.yaml"]
    environment = os.environ | {"LRLHF_REWARD_TOKEN": "a-token"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as started:
        assert started.stderr is not None
        try:
            line = started.stderr.readline()
            while "loading the model" not in line:
                assert line, "it ended"
                line = started.stderr.readline()
            yield started, line.split()[1].removesuffix(":")
        finally:
            started.kill()


def _until_healthy(address: str) -> None:
    until = time.monotonic() + 120
    while httpx.get(f"{address}/health").status_code == 503:
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_process_serves_until_it_is_asked_to_end(
    process: tuple[subprocess.Popen[str], str],
    text_scores: Scores,
    number: signal.Signals,
    status: int,
) -> None:
    started, address = process
    _until_healthy(address)
    headers = {"authorization": "Bearer a-token"}
    body = {"prompts": ["2 + 2 ="] * 2, "completions": [" 4", " 5"]}
    expected = text_scores(["2 + 2 ="] * 2, [" 4", " 5"])

    assert httpx.post(f"{address}/v1/score", json=body).status_code == 401
    answer = httpx.post(f"{address}/v1/score", json=body, headers=headers)
    assert answer.json()["scores"] == expected
    assert "server" not in answer.headers
    # a body over the limit that is still being sent when it is refused
    large = body | {"columns": {"a": ["x" * 20_000_000, ""]}}
    answer = httpx.post(f"{address}/v1/score", json=large, headers=headers, timeout=60)
    assert answer.status_code == 413

    async def ended_in_the_middle() -> httpx.Response:
        many = {"prompts": ["a" * 120] * 400, "completions": ["b" * 120] * 400}
        async with httpx.AsyncClient(timeout=60, headers=headers) as client:
            running = asyncio.create_task(client.post(f"{address}/v1/score", json=many))
            while "queue_requests 1.0" not in (await client.get(f"{address}/metrics")).text:
                await asyncio.sleep(0.005)
                if running.done():  # between two looks
                    running = asyncio.create_task(client.post(f"{address}/v1/score", json=many))
            started.send_signal(number)
            return await running

    answer = asyncio.run(ended_in_the_middle())
    assert answer.status_code == 200
    assert len(set(answer.json()["scores"])) == 1
    assert started.wait(60) == status
    assert started.stdout is not None
    assert started.stderr is not None
    told = started.stdout.read() + started.stderr.read()
    assert "a-token" not in told
    assert "2 + 2" not in told
    assert "Traceback" not in told
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health")
