"""A vLLM server beside the trainer, and what becomes of a run when it dies."""

import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.rollout import EngineFailure, Sampling, VLLMServerEngine
from lrlhf.rollout.engines.synced_engine import without_recovery
from lrlhf.rollout.vllm.client import GENERATE
from tests.vllm.models import (
    LONG,
    assert_pushes_arrive,
    assert_structured,
    build_policy,
    client_of,
    prompts_of,
    signal_server,
)

STEPS = 5


def test_pushes_agree_with_the_policy_each_time(
    server: VLLMServerEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    policy = server._policy
    assert policy is not None
    assert_pushes_arrive(server, policy, tokenizer)
    assert server.probe().mean < 1e-4


def test_changes_alone_bring_a_server_to_the_policy(
    server: VLLMServerEngine,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "delta", True)
    server._disconnect()  # the next push connects anew
    policy = server._policy
    assert_pushes_arrive(server, policy, tokenizer)
    assert server.pushed_bytes is not None
    whole = server.pushed_bytes[1]
    with torch.no_grad():
        policy.get_parameter("model.norm.weight")[:4] *= -2.0
        policy.get_parameter("model.layers.0.self_attn.k_proj.weight")[5, :3] += 0.5
    server.push(7)
    assert server.pushed_bytes == (7 * 5 + 1, whole)  # 320 unchanged words take one more
    assert server.probe().typical < 1e-4
    server.push(8)
    assert server.pushed_bytes == (0, whole)
    assert server.probe().typical < 1e-4
    server._disconnect()
    server.push(9)
    assert server.pushed_bytes == (whole, whole)


def test_responses_are_held_to_a_format(
    server: VLLMServerEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert_structured(server, tokenizer)


def test_every_route_that_changes_anything_asks_for_the_token(server: VLLMServerEngine) -> None:
    url = client_of(server).url
    assert httpx.get(f"{url}/health").status_code == 200
    for path in ("/collective_rpc", "/reset_prefix_cache", GENERATE, "/pause"):
        assert httpx.post(f"{url}{path}", json={}).status_code == 401
        wrong = {"Authorization": "Bearer " + "0" * 64}
        assert httpx.post(f"{url}{path}", json={}, headers=wrong).status_code == 401
    assert httpx.get(f"{url}/v1/models").status_code == 401


def test_a_server_that_someone_started_takes_weights_too(
    server: VLLMServerEngine,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = client_of(server)
    monkeypatch.setenv("VLLM_API_KEY", client.token)
    adapters = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    policy = get_peft_model(build_policy(tokenizer, seed=7), adapters)
    guest = VLLMServerEngine(url=client.url, start_timeout=10)
    guest.attach(policy, tokenizer)
    guest.push(3)
    assert guest.probe().mean < 1e-4
    # the one that was there first notices that its weights are gone
    with (
        pytest.raises(EngineFailure, match="other weights than it was given here"),
        without_recovery(),
    ):
        server.generate(
            prompts_of(LONG, tokenizer=tokenizer),
            Sampling(max_new_tokens=4),
            num_generations=1,
            seeds=[0],
        )
    guest.close()
    assert client.is_healthy()
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    stranger = VLLMServerEngine(url=client.url, start_timeout=10)
    stranger.attach(policy, tokenizer)
    with pytest.raises(PermissionError, match="requires another token"):
        stranger.push(0)


@pytest.mark.parametrize(
    "during",
    [
        # in the normal suite: tests of replicas and of episodes
        pytest.param("generation", marks=pytest.mark.exhaustive),
        pytest.param("a push", marks=pytest.mark.exhaustive),
        pytest.param("neither", marks=pytest.mark.exhaustive),
    ],
)
def test_a_server_that_is_killed_is_started_again_and_gives_the_same_responses(
    server: VLLMServerEngine,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    during: str,
) -> None:
    def ask() -> Tensor:
        prompts = prompts_of(LONG, "short", tokenizer=tokenizer)
        sampling = Sampling(max_new_tokens=12)
        return server.generate(prompts, sampling, num_generations=2, seeds=range(4)).input_ids

    def killing(self: Any) -> Iterator[tuple[str, Tensor]]:
        for index, pair in enumerate(read(self)):
            if index == 2 and not killed:
                killed.append(True)
                signal_server(server, signal.SIGKILL)
            yield pair

    server.push(9)
    source = type(server._transfer._source)
    expected, restarts, read = ask(), server.restarts, source.__iter__
    killed: list[bool] = []
    client = client_of(server)
    if during == "a push":
        monkeypatch.setattr(source, "__iter__", killing)
        server.push(9)
    elif during == "generation":
        monkeypatch.setattr(server, "max_num_seqs", 1)  # the second prompt is asked for later
        check = client._check

        def kill_and_check(answer: httpx.Response) -> None:
            if answer.request.url.path == GENERATE and not killed:
                killed.append(True)
                signal_server(server, signal.SIGKILL)
            check(answer)

        monkeypatch.setattr(client, "_check", kill_and_check)
    else:
        signal_server(server, signal.SIGKILL)
    assert torch.equal(ask(), expected)
    assert server.restarts == restarts + 1
