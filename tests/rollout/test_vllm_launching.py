"""What each of several servers is started with, and which engines go on during a push."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lrlhf.rollout import TransformersEngine, VLLMEngine, VLLMServerEngine
from lrlhf.rollout.engines.engine import EngineWrapper
from lrlhf.rollout.vllm.servers import ExternalServer, StartedServer
from lrlhf.rollout.vllm.vllm_base import EngineStartError

DESCRIBED = {
    "model": "one",
    "logprobs_mode": "processed_logprobs",
    "vllm": "0.32.0",
    "transfer": "lrlhf_gloo",
    "dtype": "float32",
    "max_model_len": 128,
}


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("options", "visible", "expected"),
    [
        ({"replicas": 2, "tensor_parallel_size": 2}, None, ["0,1", "2,3"]),
        ({"replicas": 3, "visible_devices": "4,6,7"}, None, ["4", "6", "7"]),
        ({"replicas": 2}, "5,3,1", ["5", "3"]),
        ({"visible_devices": "6,7", "tensor_parallel_size": 2}, None, ["6,7"]),
        ({}, "5", [None]),  # of the environment, which a server has anyway
    ],
)
@pytest.mark.usefixtures("four_gpus")
def test_each_server_has_gpus_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    visible: str | None,
    expected: list[str | None],
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    engine = VLLMServerEngine(**options)
    assert [engine._devices(number) for number in range(engine.replicas)] == expected
    if engine.replicas > 1:
        assert engine._environment("token", 1)["CUDA_VISIBLE_DEVICES"] == expected[1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "engine.transport ipc and engine.lora auto: ipc sends nothing"),
        ({"visible_devices": "1", "lora": "adapter"}, "transport nccl and engine.lora adapter"),
        ({"visible_devices": "1", "lora": "merged"}, None),
        ({"transport": "gloo"}, None),
        ({"url": "http://one"}, None),  # which says later what it takes weights by
    ],
)
@pytest.mark.usefixtures("four_gpus")
def test_changes_alone_are_refused_where_none_could_be_sent(
    options: dict[str, Any], told: str | None
) -> None:
    with nullcontext() if told is None else pytest.raises(ValueError, match=told):
        engine = VLLMServerEngine(delta=True, **options)
    VLLMServerEngine(**options)
    if "url" in options:
        engine._check_description(DESCRIBED | {"transfer": "lrlhf_nccl"})
        with pytest.raises(ValueError, match=r"engine\.delta is on, engine\.transport ipc"):
            engine._check_description(DESCRIBED | {"transfer": "lrlhf_ipc"})


@pytest.mark.usefixtures("four_gpus")
def test_too_few_gpus_are_told_of() -> None:
    engine = VLLMServerEngine(replicas=3, tensor_parallel_size=2)
    with pytest.raises(EngineStartError, match=r"takes 6 GPUs, and there are 4: lower one of them"):
        engine._devices(0)


def test_servers_write_into_files_of_their_own() -> None:
    def files(**options: Any) -> list[str | None]:
        engine = VLLMServerEngine(**options)
        servers = [engine._new_server(number) for number in range(engine.replicas)]
        assert all(isinstance(one, StartedServer) for one in servers)
        return [one._log_file for one in servers if isinstance(one, StartedServer)]

    assert files(log_file="/logs/vllm.log") == ["/logs/vllm.log"]
    several = ["/logs/vllm.0.log", "/logs/vllm.1.log"]
    assert files(log_file="/logs/vllm.log", replicas=2) == several
    assert files(replicas=2) == [None, None]


def test_every_address_is_a_server() -> None:
    engine = VLLMServerEngine(url=["http://a:1", "http://b:2"])
    assert engine.replicas == 2
    second = engine._new_server(1)
    assert isinstance(second, ExternalServer)
    assert second._url == "http://b:2"
    assert VLLMServerEngine(url="http://a:1").replicas == 1
    with pytest.raises(ValueError, match=r"engine\.replicas is 3, and engine\.url names 2 servers"):
        VLLMServerEngine(url=["http://a:1", "http://b:2"], replicas=3)
    with pytest.raises(ValueError, match=r"engine\.replicas is 0; it must be above 0"):
        VLLMServerEngine(replicas=0)


def test_servers_that_compute_differently_are_refused() -> None:
    engine = VLLMServerEngine(url=["http://a:1", "http://b:2"])
    engine._check_descriptions([DESCRIBED, DESCRIBED | {"model": "another name"}])
    with pytest.raises(EngineStartError, match="differ in their dtype: float32 and bfloat16"):
        engine._check_descriptions([DESCRIBED, DESCRIBED | {"dtype": "bfloat16"}])


def test_only_an_engine_that_can_takes_weights_while_it_generates() -> None:
    server = VLLMServerEngine()
    assert server.capabilities.updates_in_flight
    EngineWrapper.allow_updates_in_flight(SimpleNamespace(engine=server), True)  # type: ignore[arg-type]
    assert server._in_flight
    server.allow_updates_in_flight(False)
    assert not server._in_flight
    server._adapter = object()  # type: ignore[assignment]  # which is loaded under a new name
    for engine in (server, VLLMEngine(), TransformersEngine()):
        engine.allow_updates_in_flight(False)
        with pytest.raises(
            ValueError, match=f"{type(engine).__name__} does not accept new weights"
        ):
            engine.allow_updates_in_flight(True)
