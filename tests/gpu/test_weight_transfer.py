"""Weights on GPUs: NCCL to a server of its own, shared memory on one GPU, and an engine asleep."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.rollout import Sampling, SyncedEngine, VLLMEngine, VLLMServerEngine
from lrlhf.vllm_worker.fingerprint import fingerprint
from tests.vllm.models import LONG, prompts_of, signal_server

GPUS = torch.cuda.device_count()
# an engine computes in bfloat16 here; see `VLLMWeightSync`
CLOSE = 0.08

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(1500),
]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="fewer than 2 GPUs")


@torch.no_grad()
def disturb(model: nn.Module, seed: int) -> None:
    generator = torch.Generator("cuda:0").manual_seed(seed)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator, device=weight.device)
        weight.add_(noise, alpha=0.05)


def assert_pushes_arrive(engine: SyncedEngine, policy: nn.Module, count: int = 3) -> None:
    """Every push compares fingerprints; the probe, what is computed with."""
    for version in range(1, count + 1):
        disturb(policy, version)
        engine.push(version)
        assert engine.version == version
        assert engine.probe().typical < CLOSE
    assert engine.restarts == 0


def new_server(folder: Path, **options: Any) -> VLLMServerEngine:
    return VLLMServerEngine(
        max_model_len=128,
        kv_cache_gib=0.25,
        enforce_eager=True,
        log_file=str(folder / "vllm.log"),
        **options,
    )


@pytest.fixture(
    params=[
        pytest.param(({"visible_devices": "1"}, "nccl"), marks=two_gpus, id="nccl"),
        pytest.param(({"gpu_memory_utilization": 0.3}, "ipc"), id="ipc"),
        pytest.param(({"gpu_memory_utilization": 0.3, "transport": "gloo"}, "gloo"), id="gloo"),
    ]
)
def server(
    request: pytest.FixtureRequest,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> Iterator[VLLMServerEngine]:
    options, transport = request.param
    engine = new_server(tmp_path, sync_timeout=60.0, **options)
    engine.attach(policy, tokenizer)
    engine.push(0)
    assert engine._described["transfer"] == f"lrlhf_{transport}"
    yield engine
    engine.close()


@pytest.mark.gpu_lines(
    "lrlhf.rollout.vllm.server_engine",
    "lrlhf.rollout.vllm.server_engine",
    "lrlhf.rollout.vllm.transfer",
    "lrlhf.rollout.vllm.vllm_base",
    "lrlhf.vllm_worker.extension",
)
@pytest.mark.vllm
def test_pushes_to_a_server_arrive_and_their_buffers_are_given_back(
    server: VLLMServerEngine, policy: PreTrainedModel
) -> None:
    assert_pushes_arrive(server, policy)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for version in range(10, 15):
        server.push(version)
    assert torch.cuda.memory_allocated() <= before


def adapted(policy: PreTrainedModel) -> PeftModel:
    config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(policy, config).to("cuda:0")


@torch.no_grad()
def disturb_adapter(policy: PeftModel, seed: int) -> None:
    disturb(nn.ParameterList(one for one in policy.parameters() if one.requires_grad), seed)


@pytest.mark.vllm
def test_an_adapter_arrives_alone_and_its_buffers_are_given_back(
    server: VLLMServerEngine, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    with_adapter = adapted(policy)
    server.attach(with_adapter, tokenizer)
    server.push(0)
    assert server._adapter_apart is not None
    for version in range(1, 4):
        disturb_adapter(with_adapter, version)
        server.push(version)
        assert server.probe().typical < CLOSE
    # of what the engine computes the adapter is no small part
    with with_adapter.disable_adapter():
        assert server.probe().typical > 2 * CLOSE
    assert server.restarts == 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for version in range(10, 15):
        server.push(version)
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.vllm
@two_gpus
def test_an_adapter_reaches_both_gpus_of_a_server(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with_adapter = adapted(policy)
    engine = new_server(
        tmp_path, tensor_parallel_size=2, transport="gloo", gpu_memory_utilization=0.3
    )
    engine.attach(with_adapter, tokenizer)
    for version in range(3):
        disturb_adapter(with_adapter, version)
        engine.push(version)
        assert engine.probe().typical < CLOSE
    engine.close()


@pytest.mark.vllm
def test_an_engine_that_slept_has_weights_and_adapter_again(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    with_adapter = adapted(policy)
    engine = VLLMEngine(sleep=True, max_model_len=128, kv_cache_gib=0.5, lora="adapter")
    engine.attach(with_adapter, tokenizer)
    engine.push(0)
    for version in (1, 2):
        assert engine.probe().typical < CLOSE
        engine.sleep()
        disturb_adapter(with_adapter, version)
        engine.push(version)
        assert engine.probe().typical < CLOSE
        disturb_adapter(with_adapter, 10 + version)
        engine.push(version)
    engine.close()


@pytest.mark.vllm
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"transport": "gloo", "gpu_memory_utilization": 0.3}, marks=two_gpus),
        pytest.param(
            {"visible_devices": "1,2"},
            marks=pytest.mark.skipif(GPUS < 3, reason="fewer than 3 GPUs"),
        ),
    ],
    ids=["gloo", "nccl"],
)
def test_a_server_on_two_gpus_gets_the_weights_on_both(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    options: dict[str, Any],
) -> None:
    engine = new_server(tmp_path, tensor_parallel_size=2, **options)
    engine.attach(policy, tokenizer)
    assert_pushes_arrive(engine, policy)
    engine.close()


@pytest.mark.vllm
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_a_server_that_fails_in_a_push_is_started_again_in_time(
    server: VLLMServerEngine,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    def ask() -> Tensor:
        prompts = prompts_of(LONG, "short", tokenizer=tokenizer).to(torch.device("cuda:0"))
        sampling = Sampling(max_new_tokens=12, temperature=0.0)
        return server.generate(prompts, sampling, num_generations=1, seeds=range(2)).input_ids

    expected = ask()
    source, failed = type(server._transfer._source), []
    read = source.__iter__

    def failing(self: Any) -> Iterator[tuple[str, Tensor]]:
        for index, pair in enumerate(read(self)):
            if index == 2 and not failed:
                failed.append(True)
                signal_server(server, number)
            yield pair

    monkeypatch.setattr(source, "__iter__", failing)
    server.sync_timeout = server._transfer._client.timeout = 15.0
    started = time.monotonic()
    server.push(9)
    # the time-out, and a start of the server
    assert time.monotonic() - started < 400
    assert server.restarts == 1
    assert torch.equal(ask(), expected)


@pytest.mark.gpu_lines(
    "lrlhf.rollout.vllm.inprocess_engine",
    "lrlhf.rollout.vllm.vllm_base",
    "lrlhf.vllm_worker.model_access",
)
@pytest.mark.vllm
def test_an_engine_that_slept_has_the_weights_of_the_push_that_woke_it(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    engine = VLLMEngine(sleep=True, max_model_len=128, kv_cache_gib=0.5, enforce_eager=True)
    engine.attach(policy, tokenizer)
    assert_pushes_arrive(engine, policy, count=1)
    free = torch.cuda.mem_get_info()[0]
    for version in (5, 6):
        engine.sleep()
        assert engine.version is None
        assert torch.cuda.mem_get_info()[0] > free + 2**28  # of half a GiB for keys and values
        # what the trainer freed, and keeps for itself, is given back before the engine wakes
        held = torch.empty(2**28, dtype=torch.uint8, device="cuda")
        del held
        disturb(policy, version)
        engine.push(version)
        assert torch.cuda.memory_reserved() < 2**28 + torch.cuda.memory_allocated()
        assert engine.probe().typical < CLOSE
    engine.close()


@pytest.mark.gpu_lines("lrlhf.vllm_worker.fingerprint.fingerprint")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(), (7,), (33, 31), (900, 1000)])
def test_a_fingerprint_on_a_gpu_is_that_of_the_copy_on_a_cpu(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (100 * torch.rand(shape)).to(dtype)
    for turn in (0, 5):
        found = fingerprint(tensor.cuda(), turn=turn)
        assert found.is_cuda  # nothing was waited for
        assert int(found) == int(fingerprint(tensor, turn=turn))


@pytest.mark.gpu_lines("lrlhf.vllm_worker.fingerprint._weights")
def test_fingerprints_taken_on_several_streams_agree() -> None:
    tensor = torch.randn(3000, 1000)
    expected = int(fingerprint(tensor, turn=1))
    moved = tensor.cuda()
    torch.cuda.synchronize()
    found = []
    for _ in range(4):
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(fingerprint(moved, turn=1))
    torch.cuda.synchronize()
    assert [int(one) for one in found] == [expected] * 4
