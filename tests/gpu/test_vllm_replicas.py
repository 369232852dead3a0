"""Several vLLM servers on GPUs: weights to all of them at once, and one that is lost."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.rollout import Sampling, VLLMServerEngine
from tests.gpu.test_weight_transfer import CLOSE, assert_pushes_arrive, disturb, new_server
from tests.vllm.models import LONG, prompts_of, signal_server

GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(1500),
]
three_gpus = pytest.mark.skipif(GPUS < 3, reason="fewer than 3 GPUs")


@pytest.fixture(
    params=[
        pytest.param(({"visible_devices": "1,2"}, "nccl"), marks=three_gpus, id="nccl"),
        # both beside the trainer, on its only GPU
        pytest.param(
            ({"visible_devices": "0,0", "transport": "ipc", "gpu_memory_utilization": 0.2}, "ipc"),
            id="ipc",
        ),
    ]
)
def pair(
    request: pytest.FixtureRequest,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> Iterator[VLLMServerEngine]:
    options, transport = request.param
    engine = new_server(tmp_path, sync_timeout=60.0, replicas=2, **options)
    engine.attach(policy, tokenizer)
    engine.push(0)
    assert engine._described["transfer"] == f"lrlhf_{transport}"
    yield engine
    engine.close()


@pytest.mark.gpu_lines(
    "lrlhf.rollout.vllm.server_engine",
    "lrlhf.rollout.vllm.transfer",
)
def test_all_servers_have_the_weights_of_every_push_also_after_one_was_lost(
    pair: VLLMServerEngine, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    # every push compares the fingerprints of the workers of both
    assert_pushes_arrive(pair, policy)
    assert len(pair._replicas) == 2
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for version in range(10, 15):
        pair.push(version)
    assert torch.cuda.memory_allocated() <= before
    prompts = prompts_of(LONG, "short", tokenizer=tokenizer).to(torch.device("cuda:0"))
    sampling = Sampling(max_new_tokens=12, temperature=0.0)

    def ask() -> torch.Tensor:
        return pair.generate(prompts, sampling, num_generations=1, seeds=range(2)).input_ids

    expected = ask()
    signal_server(pair, signal.SIGKILL, replica=1)
    assert torch.equal(ask(), expected)
    assert pair.restarts == 1
    disturb(policy, 20)
    pair.push(20)  # to the one that is left: the communicator is made anew
    assert [one.number for one in pair._replicas] == [0]
    assert pair.probe().typical < CLOSE
