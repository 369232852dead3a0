"""What an engine says of its log-probabilities is true, also of models that batches disturb.

What is expected comes from ``transformers``' own forward pass over one row at a time.
"""

import logging

import peft
import pytest
import torch
from transformers import DynamicCache

from lrlhf.models import sequence_logprobs
from lrlhf.rollout import Sampling, TransformersEngine
from lrlhf.rollout.engines.transformers_engine import trial_prompts
from tests.conftest import build_language_model, build_tokenizer
from tests.models.text_families import tiny_model
from tests.rollout.test_transformers_engine import gap, generate


# RWKV mixes the rows of a batch when it decodes; the states of RecurrentGemma are no part of the
# cache, and take the padding in
@pytest.mark.parametrize("family", ["rwkv", "recurrent_gemma"])
def test_responses_are_drawn_from_the_policy_whatever_a_batch_does_to_the_model(
    family: str, tokenizer, caplog
) -> None:
    model, engine = tiny_model(family), TransformersEngine()
    with caplog.at_level(logging.WARNING, "lrlhf"):
        rollout = generate(
            model, tokenizer, Sampling(max_new_tokens=5), num_generations=2, engine=engine
        )
    assert engine.capabilities.exact
    assert gap(model, rollout) < 1e-4
    assert "does not generate as a forward pass" in caplog.text


def test_a_model_that_generates_otherwise_than_it_computes_is_not_called_exact(
    language_model, tokenizer, caplog
) -> None:
    def sharpen(
        _: torch.nn.Module, inputs: tuple[torch.Tensor, ...], logits: torch.Tensor
    ) -> torch.Tensor:
        decodes = inputs[0].ndim == 3 and inputs[0].shape[1] == 1
        return logits * 1.5 if decodes else logits

    language_model.lm_head.register_forward_hook(sharpen)
    engine = TransformersEngine()
    assert engine.capabilities.exact
    with caplog.at_level(logging.WARNING, "lrlhf"):
        generate(language_model, tokenizer, Sampling(max_new_tokens=2), engine=engine)
    assert not engine.capabilities.exact
    assert "model.importance_sampling" in caplog.text
    # nothing helps, so nothing is slowed down
    assert engine._mode.shares_prompts


def test_an_ordinary_model_is_exact_and_computes_prompts_once(
    language_model, tokenizer, caplog
) -> None:
    adapted = peft.get_peft_model(
        language_model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    engine = TransformersEngine(max_batch_size=1)
    with caplog.at_level(logging.WARNING, "lrlhf"):
        rollout = generate(adapted, tokenizer, Sampling(max_new_tokens=2), engine=engine)
    assert engine.capabilities.exact
    assert engine._mode.shares_prompts
    assert not caplog.records
    own = sequence_logprobs(adapted, rollout)
    torch.testing.assert_close(own, rollout.sampling_logprobs, atol=1e-4, rtol=1e-4)


def test_lack_of_memory_is_no_refusal(language_model, tokenizer, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(DynamicCache, "reorder_cache", full)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        generate(language_model, tokenizer, Sampling(max_new_tokens=2), num_generations=2)


def test_a_cache_that_is_copied_wrongly_is_not_shared(
    language_model, tokenizer, monkeypatch
) -> None:
    def mixed_up(self: DynamicCache, rows: torch.Tensor) -> None:
        for layer in self.layers:
            layer.reorder_cache(rows.flip(0))

    monkeypatch.setattr(DynamicCache, "reorder_cache", mixed_up)
    engine = TransformersEngine()
    generate(language_model, tokenizer, Sampling(max_new_tokens=2), engine=engine)
    assert engine.capabilities.exact
    assert not engine._mode.shares_prompts


def test_weights_that_are_not_finite_are_left_to_the_guard(language_model, tokenizer) -> None:
    with torch.no_grad():
        language_model.model.norm.weight.fill_(torch.nan)
    engine = TransformersEngine()
    rollout = generate(language_model, tokenizer, Sampling(max_new_tokens=2), engine=engine)
    assert not engine.capabilities.exact
    assert rollout.sampling_logprobs[rollout.response_mask].isnan().all()


@pytest.mark.parametrize("tokens", [3, 6, 8, 9, 260])
def test_trial_prompts_have_three_lengths_however_few_tokens_there_are(tokens: int) -> None:
    model = build_language_model(build_tokenizer(), vocab_size=tokens)
    prompts = trial_prompts(model)
    assert prompts.attention_mask.sum(dim=1).tolist() == [6, 3, 1]
    assert int(prompts.input_ids.max()) < tokens
