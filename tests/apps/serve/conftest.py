"""Tiny reward models, and clients of a service that runs in this process."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerBase

from lrlhf.apps.serve import QueueOptions, RequestLimits, RewardService
from lrlhf.apps.serve.app import new_server
from lrlhf.models import ScoreModel
from lrlhf.rewards import LearnedReward
from tests.conftest import build_language_model
from tests.vlms import build_vlm, save_vlm

Answer = httpx.Response
Scores = Callable[..., list[float | None]]


def lengths(*, completions: list[Any]) -> list[float]:
    return [float(len(text)) for text in completions]


class Slow:
    """A reward function that gives the lengths when it may go on."""

    __name__ = "slow"

    def __init__(self) -> None:
        self.asked, self.go, self.calls = threading.Event(), threading.Event(), 0

    def __call__(self, *, completions: list[Any]) -> list[float]:
        self.calls += 1
        self.asked.set()
        assert self.go.wait(30)
        return lengths(completions=completions)


class Client:
    """Asks a service without a network."""

    def __init__(self, service: RewardService, **headers: str) -> None:
        self.service = service
        self._headers = headers

    async def send(self, method: str, path: str, **options: Any) -> Answer:
        transport = httpx.ASGITransport(app=self.service.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://service", headers=self._headers
        ) as client:
            return await client.request(method, path, **options)

    def get(self, path: str, **options: Any) -> Answer:
        return asyncio.run(self.send("GET", path, **options))

    def post(self, path: str = "/v1/score", body: Any = None, **options: Any) -> Answer:
        return asyncio.run(self.send("POST", path, json=body, **options))

    def raw(self, content: bytes, path: str = "/v1/score", **headers: str) -> Answer:
        headers = {"content-type": "application/json", **headers}
        return asyncio.run(self.send("POST", path, content=content, headers=headers))

    def together(self, bodies: list[Any], path: str = "/v1/score") -> list[Answer]:
        async def gathered() -> list[Answer]:
            return await asyncio.gather(*(self.send("POST", path, json=body) for body in bodies))

        return asyncio.run(gathered())

    def metrics(self) -> dict[str, float]:
        lines = self.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it never became true"
        time.sleep(0.005)


@pytest.fixture
def serving() -> Iterator[Callable[..., Client]]:
    """Start a service around a reward, and wait until it is loaded."""
    started: list[RewardService] = []

    def start(
        scorer: Any,
        *,
        token: str | None = None,
        limits: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        wait: bool = True,
        **queue: Any,
    ) -> Client:
        service = RewardService(
            scorer, token=token, limits=RequestLimits(**limits or {}), queue=QueueOptions(**queue)
        )
        started.append(service)
        service.batcher.start()
        if wait:
            wait_until(lambda: service.batcher.served is not None)
        return Client(service, **headers or {})

    yield start
    for service in started:
        service.close()


class Address:
    """A service that listens, and its clients."""

    def __init__(self, port: int, service: RewardService, server: Any) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.service = service
        self.open = server.server_state.connections
        self.opened = contextlib.ExitStack()

    def connect(self, *parts: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20.0)
        self.opened.enter_context(connection)
        for part in parts:
            connection.sendall(part)
        return connection

    def score(self, **headers: str) -> int:
        """Ask over a connection of its own, as an honest client does."""
        url = f"{self.url}/v1/score"
        return httpx.post(url, json=body_of(), headers=headers, timeout=20.0).status_code


@pytest.fixture
def listening() -> Iterator[Callable[..., Address]]:
    """Start services that listen, each with an event loop in a thread of its own."""
    with contextlib.ExitStack() as stack:

        def start(scorer: Any = lengths, token: str | None = None, **queue: Any) -> Address:
            options = QueueOptions(**queue)
            service = RewardService(scorer, token=token, queue=options)
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            server = new_server(
                service, max_queue=options.max_queue, grace_seconds=options.timeout_s
            )
            thread = threading.Thread(target=asyncio.run, args=(server.serve([listener]),))
            thread.start()
            stack.callback(thread.join)
            stack.callback(setattr, server, "should_exit", True)
            address = Address(listener.getsockname()[1], service, server)
            stack.callback(address.opened.close)
            wait_until(lambda: service.batcher.served is not None)
            return address

        yield start


Serving = Callable[..., Client]
Listening = Callable[..., Address]


@pytest.fixture(scope="session")
def text_reward(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase
) -> str:
    """A stock sequence classifier with one label."""
    config = build_language_model(tokenizer).config
    config.num_labels = 1
    folder = tmp_path_factory.mktemp("text-reward")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def vision_reward(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model that sees images and videos, as RewardModel writes it."""
    source, folder = (tmp_path_factory.mktemp(name) for name in ("vlm", "vision-reward"))
    save_vlm("qwen2_5_vl", source)
    vlm = build_vlm("qwen2_5_vl")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = ScoreModel(source=str(source), pooling="mean", head="mlp").load()
    network.save_pretrained(folder, vlm.tokenizer)
    vlm.processor.save(folder)
    return str(folder)


@pytest.fixture(scope="session")
def text_scores(text_reward: str) -> Scores:
    """What the model gives when it is asked without a service."""
    function = LearnedReward(text_reward)

    def score(prompts: list[Any], completions: list[Any]) -> list[float | None]:
        return function(
            prompts=prompts, completions=completions, log_metric=lambda name, value: None
        )

    return score


def file_of(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def text_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def body_of(**values: Any) -> dict[str, Any]:
    return {"prompts": ["2 + 2 ="], "completions": [" 4"], **values}


def folder_config(folder: Path, **values: Any) -> Path:
    """A config of the command; JSON is YAML."""
    path = folder / "serve.yaml"
    path.write_text(json.dumps(values, indent=1))
    return path
