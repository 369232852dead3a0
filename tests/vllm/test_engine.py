"""vLLM inside the process, on its CPU kernels."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.rollout import EngineFailure, Sampling, VLLMEngine
from tests.vllm.models import (
    LONG,
    assert_pushes_arrive,
    assert_structured,
    build_policy,
    disturb,
    largest_gap,
    prompts_of,
)


def test_pushes_of_changing_weights_agree_with_the_policy_each_time(
    engine: VLLMEngine, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert_pushes_arrive(engine, policy, tokenizer)


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


def test_a_stop_string_ends_a_response_and_stays_in_it(
    engine: VLLMEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    rollout = engine.generate(
        prompts_of(LONG, tokenizer=tokenizer),
        Sampling(max_new_tokens=64, temperature=2.0, stop=("b", "c", "g", "h")),
        num_generations=8,
        seeds=range(8),
    )
    rows = zip(rollout.input_ids, rollout.response_mask, rollout.truncated, strict=True)
    texts = [tokenizer.decode(ids[mask]) for ids, mask, cut in rows if not cut]
    stopped = [text for text in texts if not text.endswith(tokenizer.eos_token)]
    assert stopped
    assert all(text[-1] in "bcgh" and not set(text[:-1]) & set("bcgh") for text in stopped)


def test_responses_are_held_to_a_format(
    engine: VLLMEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert_structured(engine, tokenizer)


@pytest.mark.parametrize("broken", ["_reset_caches", "lrlhf.vllm_worker.model_access._repack"])
def test_cached_states_and_a_stale_output_layer_show_in_the_probe(
    engine: VLLMEngine, policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    assert engine.probe().mean < 1e-4
    if broken == "_reset_caches":
        monkeypatch.setattr(engine, broken, lambda: None)
    else:
        monkeypatch.setattr(broken, lambda model: None)
    disturb(policy, seed=1)
    engine.push(1)
    assert engine.probe().mean > 1e-2


def test_a_new_engine_takes_the_place_of_one_that_failed(
    engine: VLLMEngine,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts, sampling = prompts_of(LONG, "short", tokenizer=tokenizer), Sampling(max_new_tokens=12)
    expected = engine.generate(prompts, sampling, num_generations=2, seeds=range(4))
    first, restarts, send = engine._llm, engine.restarts, engine._send

    def fail(*_: object, **__: object) -> None:
        raise IndexError("a kernel went wrong")

    def break_off(tensors: Iterable[tuple[str, Tensor]]) -> list[dict[str, str]]:
        monkeypatch.setattr(engine, "_send", send)
        next(iter(tensors))
        raise EngineFailure("the connection broke")

    # a step fails, and then the push into the engine that was started for it
    monkeypatch.setattr(engine._llm, "generate", fail)
    monkeypatch.setattr(engine, "_send", break_off)
    state = torch.get_rng_state()
    again = engine.generate(prompts, sampling, num_generations=2, seeds=range(4))
    assert torch.equal(torch.get_rng_state(), state)  # which vLLM seeds as it starts
    assert engine._llm is not first
    assert engine.restarts == restarts + 2
    assert torch.equal(again.input_ids, expected.input_ids)
    assert torch.equal(again.sampling_logprobs, expected.sampling_logprobs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["untied", "lora"])
def test_every_kind_of_policy_is_pushed_whole(
    tokenizer: PreTrainedTokenizerBase, kind: str
) -> None:
    plain = build_policy(tokenizer, tied=kind == "lora")
    adapters = LoraConfig(r=4, target_modules="all-linear")
    policy = get_peft_model(plain, adapters) if kind == "lora" else plain
    engine = VLLMEngine(max_model_len=128, kv_cache_gib=0.05)
    engine.attach(policy, tokenizer)
    assert_pushes_arrive(engine, policy, tokenizer, count=5)
    engine.close()


def test_prompts_that_are_more_than_one_pass_takes_are_not_cut(
    engine: VLLMEngine, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    # 200 of 60 tokens and more: a pass of vLLM has 2,048 to 8,192
    prompts = prompts_of(*(f"{number} {LONG}" for number in range(200)), tokenizer=tokenizer)
    assert prompts.attention_mask.sum() > 8192
    sampling = Sampling(max_new_tokens=2)
    rollout = engine.generate(prompts, sampling, num_generations=1, seeds=range(200))
    assert largest_gap(policy, rollout) < 1e-4
