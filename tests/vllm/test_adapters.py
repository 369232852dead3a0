"""LoRA adapters that vLLM adds itself, inside the process and in a server."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from lrlhf.rollout import Sampling, SyncedEngine, VLLMEngine, VLLMServerEngine
from lrlhf.vllm_worker.model_access import PREFIX
from tests.vllm.models import (
    LONG,
    adapter_of,
    build_adapted,
    client_of,
    disturb,
    largest_gap,
    new_server,
    prompts_of,
    signal_server,
)


def sent_names(engine: SyncedEngine, monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Note the names of what each push sends."""
    sent: list[set[str]] = []
    send = engine._send

    def noting(tensors):
        arrived = send(tensors)
        sent.append(set(tensors.seen))
        return arrived

    monkeypatch.setattr(engine, "_send", noting)
    return sent


def assert_adapters_arrive(
    engine: SyncedEngine,
    policy: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = sent_names(engine, monkeypatch)
    prompts, sampling = prompts_of(LONG, "short", tokenizer=tokenizer), Sampling(max_new_tokens=12)
    for version in range(1, 4):
        disturb(adapter_of(policy), seed=version)
        engine.push(version)
        rollout = engine.generate(prompts, sampling, num_generations=2, seeds=range(4))
        assert largest_gap(policy, rollout) < 1e-4
        assert engine.probe().mean < 1e-4
        with policy.disable_adapter():  # it matters
            assert largest_gap(policy, rollout) > 1e-2
    linear = 7 * policy.config.num_hidden_layers
    for names in sent:
        assert len(names) == 2 * linear
        assert all(name.startswith(PREFIX) for name in names)


@pytest.fixture(scope="module")
def _first(tokenizer: PreTrainedTokenizerBase) -> PeftModel:
    return build_adapted(tokenizer)


@pytest.fixture
def policy(_first: PeftModel) -> Iterator[PeftModel]:
    """The same object for all tests, so that no engine has to start for another one."""
    before = {name: value.clone() for name, value in _first.state_dict().items()}
    yield _first
    _first.load_state_dict(before)


@pytest.fixture(scope="module")
def _started(_first: PeftModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(max_model_len=128, kv_cache_gib=0.05, lora="adapter")
    engine.attach(_first, tokenizer)
    yield engine
    engine.close()


@pytest.fixture
def engine(
    _started: VLLMEngine, policy: PeftModel, tokenizer: PreTrainedTokenizerBase
) -> VLLMEngine:
    _started.attach(policy, tokenizer)
    _started.outdate()
    _started.push(0)
    return _started


def test_only_the_adapter_is_pushed_again(
    engine: VLLMEngine,
    policy: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert_adapters_arrive(engine, policy, tokenizer, monkeypatch)


def test_an_adapter_that_is_not_read_again_shows_in_the_probe(
    engine: VLLMEngine, policy: PeftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.push(5)
    assert engine.probe().mean < 1e-4
    # vLLM takes an adapter of a number that it knows for the one that it has
    monkeypatch.setattr(engine, "_turn", engine._turn - 1)
    disturb(adapter_of(policy), seed=6, scale=0.2)
    engine.push(6)
    assert engine.probe().mean > 1e-2
    engine.push(7)
    assert engine.probe().mean < 1e-4


def test_merged_pushes_give_the_same_responses(
    engine: VLLMEngine, policy: PeftModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    engine.push(8)
    merging = VLLMEngine(max_model_len=128, kv_cache_gib=0.05, lora="merged")
    merging.attach(policy, tokenizer)
    merging.push(8)
    assert merging._described["max_lora_rank"] == 0
    prompts, sampling = prompts_of(LONG, "short", tokenizer=tokenizer), Sampling(max_new_tokens=12)
    apart, merged = (
        one.generate(prompts, sampling, num_generations=2, seeds=range(4))
        for one in (engine, merging)
    )
    merging.close()
    assert torch.equal(apart.input_ids, merged.input_ids)
    torch.testing.assert_close(apart.sampling_logprobs, merged.sampling_logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("why", ["a restart", "outdated", "asleep"])
def test_the_weights_under_the_adapter_come_again(
    engine: VLLMEngine, policy: PeftModel, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    engine.push(9)
    with torch.no_grad():
        policy.get_input_embeddings().weight.mul_(1.1)
    if why == "asleep":
        # as on a GPU, where the weights are thrown away
        monkeypatch.setattr(engine, "sleeps", True)
        monkeypatch.setattr(engine._llm, "sleep", lambda level: None)
        engine.sleep()
        monkeypatch.setattr(engine, "_asleep", False)
    elif why == "outdated":
        engine.outdate()
    else:
        engine.close()
    sent = sent_names(engine, monkeypatch)
    engine.push(10)
    assert "model.embed_tokens.weight" in sent[0]
    assert engine.probe().mean < 1e-4


@pytest.fixture(scope="module")
def server(
    _first: PeftModel, tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMServerEngine]:
    engine = new_server(tmp_path_factory.mktemp("adapters"), lora="adapter")
    engine.attach(_first, tokenizer)
    engine.push(0)
    yield engine
    engine.close()


def test_only_the_adapter_is_sent_again_to_a_server(
    server: VLLMServerEngine,
    policy: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert_adapters_arrive(server, policy, tokenizer, monkeypatch)
    # the server knows no older one, and nothing of it lies about
    models = client_of(server).request("GET", "/v1/models")["data"]
    assert [one["id"] for one in models if one["parent"]] == list(server._targets.models.values())
    assert not list(Path(tempfile.gettempdir()).glob("lrlhf-adapter-*"))


@pytest.mark.exhaustive  # a start more; whole weights are tried so in every run
def test_a_server_that_is_killed_gets_weights_and_adapter_again(
    server: VLLMServerEngine,
    policy: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.push(3)
    sent, restarts = sent_names(server, monkeypatch), server.restarts
    signal_server(server, signal.SIGKILL)
    prompts, sampling = prompts_of(LONG, "short", tokenizer=tokenizer), Sampling(max_new_tokens=12)
    rollout = server.generate(prompts, sampling, num_generations=2, seeds=range(4))
    assert server.restarts == restarts + 1
    assert len(sent) == 1
    assert "model.embed_tokens.weight" in sent[0]
    assert largest_gap(policy, rollout) < 1e-4
