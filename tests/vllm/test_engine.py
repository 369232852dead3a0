"""vLLM inside the process, on its CPU kernels."""

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.rollout import (
    EngineFailure,
    Sampling,
    TransformersEngine,
    VLLMEngine,
    WeightSyncError,
)
from lrlhf.rollout.vllm.vllm_base import EngineStartError
from tests.vllm.models import build_policy, disturb, largest_gap, prompts_of

LONG = "a prompt that fills more than one block of the prefix cache"


@pytest.fixture
def engine(
    started: VLLMEngine, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> VLLMEngine:
    started.attach(policy, tokenizer)
    started.push(0)
    return started


def test_ten_pushes_of_changing_weights_agree_with_the_policy_each_time(
    engine: VLLMEngine, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts = prompts_of(LONG, "short", tokenizer=tokenizer)
    sampling = Sampling(max_new_tokens=12, temperature=0.8)
    for version in range(1, 11):
        disturb(policy, seed=version)
        engine.push(version)
        rollout = engine.generate(prompts, sampling, num_generations=2, seeds=[1, 2, 3, 4])
        assert largest_gap(policy, rollout, 0.8) < 1e-4
        assert rollout.weight_version is not None
        assert rollout.weight_version.tolist() == [version] * 4


def test_an_untied_output_layer_is_pushed_too(tokenizer: PreTrainedTokenizerBase) -> None:
    policy = build_policy(tokenizer, tied=False)
    engine = VLLMEngine(max_model_len=128, kv_cache_gib=0.05)
    engine.attach(policy, tokenizer)
    prompts = prompts_of(LONG, tokenizer=tokenizer)
    for version in range(10):
        disturb(policy, seed=version)
        engine.push(version)
        rollout = engine.generate(
            prompts, Sampling(max_new_tokens=12), num_generations=2, seeds=[1, 2]
        )
        assert largest_gap(policy, rollout) < 1e-4
    engine.close()


def test_lora_adapters_are_merged_on_the_way(
    engine: VLLMEngine, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    adapted = get_peft_model(policy, LoraConfig(r=4, target_modules="all-linear"))
    engine.attach(adapted, tokenizer)
    before = {name: weight.clone() for name, weight in adapted.state_dict().items()}
    for version in range(3):
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(weight, std=0.2)
                before[name] = weight.detach().clone()
        engine.push(version)
        rollout = engine.generate(
            prompts_of(LONG, tokenizer=tokenizer),
            Sampling(max_new_tokens=12),
            num_generations=2,
            seeds=[1, 2],
        )
        assert largest_gap(adapted, rollout) < 1e-4
    after = adapted.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_a_seed_gives_the_same_response_whatever_else_is_in_the_batch(
    engine: VLLMEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    sampling = Sampling(max_new_tokens=12)
    texts = (LONG, "short", "another one")
    whole = engine.generate(
        prompts_of(*texts, tokenizer=tokenizer), sampling, num_generations=2, seeds=range(6)
    )
    for row in range(6):
        alone = engine.generate(
            prompts_of(texts[row // 2], tokenizer=tokenizer),
            sampling,
            num_generations=1,
            seeds=[row],
        )
        ids = whole.input_ids[row, : whole.lengths[row]]
        assert torch.equal(alone.input_ids[0, : alone.lengths[0]], ids)


def test_the_prompt_of_a_group_is_computed_once(
    engine: VLLMEngine, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached: list[int] = []
    generate = engine._llm.generate

    def spied(*args: object, **options: object) -> list[Any]:
        answers: list[Any] = generate(*args, **options)
        cached.extend(answer.num_cached_tokens for answer in answers)
        return answers

    monkeypatch.setattr(engine._llm, "generate", spied)
    prompts = prompts_of(LONG, tokenizer=tokenizer)
    # one token per byte, and blocks of 32: all of the prompt but an unfinished block is shared
    shared = len(LONG) // 32 * 32
    assert shared > 0
    engine.forget()
    engine.generate(prompts, Sampling(max_new_tokens=2), num_generations=4, seeds=[1, 2, 3, 4])
    assert cached == [0, shared, shared, shared]


def test_greedy_responses_are_those_of_transformers(
    engine: VLLMEngine, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    other = TransformersEngine()
    other.attach(policy, tokenizer)
    prompts = prompts_of(LONG, "short", tokenizer=tokenizer)
    sampling = Sampling(temperature=0.0, max_new_tokens=16)
    ours = engine.generate(prompts, sampling, num_generations=1, seeds=[0, 0])
    theirs = other.generate(prompts, sampling, num_generations=1, seeds=[0, 0])
    assert torch.equal(ours.input_ids, theirs.input_ids)
    assert torch.equal(ours.response_mask, theirs.response_mask)
    assert torch.equal(ours.truncated, theirs.truncated)
    torch.testing.assert_close(ours.sampling_logprobs, theirs.sampling_logprobs, atol=1e-4, rtol=0)


def test_every_end_of_sequence_id_ends_a_response_and_stays_in_it(
    engine: VLLMEngine, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    # half of the vocabulary ends a response, so that most of them end early
    ends = list(range(4, len(tokenizer), 2))
    policy.generation_config.eos_token_id = ends
    rollout = engine.generate(
        prompts_of(LONG, tokenizer=tokenizer),
        Sampling(max_new_tokens=8),
        num_generations=16,
        seeds=range(16),
    )
    for row in range(16):
        response = rollout.input_ids[row][rollout.response_mask[row]].tolist()
        ended = [token in {*ends, tokenizer.eos_token_id} for token in response]
        assert not any(ended[:-1])
        assert ended[-1] == (not rollout.truncated[row])
    assert 0 < int(rollout.truncated.sum()) < 16 or not rollout.truncated.any()


def test_a_stop_string_ends_a_response_and_stays_in_it(
    engine: VLLMEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    rollout = engine.generate(
        prompts_of(LONG, tokenizer=tokenizer),
        Sampling(max_new_tokens=64, temperature=2.0, stop=("b", "c", "g", "h")),
        num_generations=8,
        seeds=range(8),
    )
    texts = [
        tokenizer.decode(ids[mask])
        for ids, mask in zip(rollout.input_ids, rollout.response_mask, strict=True)
    ]
    stopped = [
        text
        for text, cut in zip(texts, rollout.truncated, strict=True)
        if not cut and not text.endswith(tokenizer.eos_token)
    ]
    assert stopped
    assert all(text[-1] in "bcgh" and not set(text[:-1]) & set("bcgh") for text in stopped)


def test_logprobs_are_of_the_distribution_that_top_k_leaves(
    engine: VLLMEngine, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    rollout = engine.generate(
        prompts_of(LONG, tokenizer=tokenizer),
        Sampling(max_new_tokens=8, temperature=0.7, top_k=3),
        num_generations=2,
        seeds=[1, 2],
    )
    for row, length in enumerate(rollout.lengths.tolist()):
        ids = rollout.input_ids[row, :length]
        with torch.no_grad():
            logits = policy(ids[None]).logits[0, :-1] / 0.7
        kept = logits.topk(3, dim=-1)
        for place in rollout.response_mask[row].nonzero()[:, 0].tolist():
            candidates = kept.indices[place - 1].tolist()
            position = candidates.index(int(ids[place]))
            expected = kept.values[place - 1].log_softmax(-1)[position]
            assert abs(float(expected - rollout.sampling_logprobs[row, place])) < 1e-4


def test_a_prompt_that_leaves_no_room_names_the_option(
    engine: VLLMEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ValueError, match=r"140 tokens .*engine\.max_model_len.*raise it to 150"):
        engine.generate(
            prompts_of("x" * 140, tokenizer=tokenizer),
            Sampling(max_new_tokens=10),
            num_generations=1,
            seeds=[0],
        )


def test_neither_start_nor_sampling_moves_the_random_numbers_of_the_process(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    engine = VLLMEngine(max_model_len=128, kv_cache_gib=0.05)
    engine.attach(policy, tokenizer)
    engine.push(0)
    engine.probe()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    engine.close()


def test_a_weight_that_is_not_pushed_is_named(
    engine: VLLMEngine, policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "model.layers.1.mlp.down_proj.weight"
    send = engine._send

    def drop(tensors: Iterable[tuple[str, Tensor]]) -> list[dict[str, str]]:
        return send((name, tensor) for name, tensor in tensors if name != missing)

    monkeypatch.setattr(engine, "_send", drop)
    disturb(policy, seed=1)
    with pytest.raises(WeightSyncError, match=missing.replace(".", r"\.")):
        engine.push(1)
    assert engine.version is None


def test_older_weights_are_named(
    engine: VLLMEngine, policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    send = engine._send

    def deliver_old(tensors: Iterable[tuple[str, Tensor]]) -> list[dict[str, str]]:
        return send((name, old[name]) for name, _ in tensors)

    monkeypatch.setattr(engine, "_send", deliver_old)
    disturb(policy, seed=1)
    with pytest.raises(WeightSyncError, match=r"other values of the weight model\.embed_tokens"):
        engine.push(1)


def test_a_prefix_cache_that_is_not_reset_shows_in_the_probe(
    engine: VLLMEngine, policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.probe().mean < 1e-4
    monkeypatch.setattr(engine, "_reset_caches", lambda: None)
    disturb(policy, seed=1)
    engine.push(1)
    assert engine.probe().mean > 1e-2


def test_a_stale_output_layer_shows_in_the_probe(
    engine: VLLMEngine, policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lrlhf.vllm_worker.extension._repack", lambda model: None)
    disturb(policy, seed=1)
    engine.push(1)
    assert engine.probe().mean > 1e-2


def test_after_a_failed_step_the_same_responses_come_from_a_new_engine(
    engine: VLLMEngine, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, sampling = prompts_of(LONG, "short", tokenizer=tokenizer), Sampling(max_new_tokens=12)
    expected = engine.generate(prompts, sampling, num_generations=2, seeds=range(4))
    first, restarts = engine._llm, engine.restarts

    def fail(*_: object, **__: object) -> None:
        raise IndexError("a kernel went wrong")

    monkeypatch.setattr(engine._llm, "generate", fail)
    again = engine.generate(prompts, sampling, num_generations=2, seeds=range(4))
    assert engine._llm is not first
    assert engine.restarts == restarts + 1
    assert torch.equal(again.input_ids, expected.input_ids)
    assert torch.equal(again.sampling_logprobs, expected.sampling_logprobs)


def test_after_a_push_that_broke_off_the_engine_is_started_anew(
    engine: VLLMEngine, policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, calls = engine._send, []

    def break_off(tensors: Iterable[tuple[str, Tensor]]) -> list[dict[str, str]]:
        calls.append(1)
        return send(_breaking(tensors) if len(calls) == 1 else tensors)

    monkeypatch.setattr(engine, "_send", break_off)
    disturb(policy, seed=1)
    assert engine.push(1).restarts == 1
    assert engine.probe().mean < 1e-4


def _breaking(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for index, pair in enumerate(tensors):
        if index == 3:
            raise EngineFailure("the connection broke")
        yield pair


def test_a_cache_too_small_for_the_longest_response_names_the_numbers(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    engine = VLLMEngine(max_model_len=256, kv_cache_gib=0.0001)
    engine.attach(policy, tokenizer)
    with pytest.raises(EngineStartError, match=r"kv_cache_gib is 0.0001.*max_model_len is 256"):
        engine.push(0)
