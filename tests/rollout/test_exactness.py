"""What an engine says of its log-probabilities is true, also of models that batches disturb.

What is expected comes from ``transformers``' own forward pass over one row at a time.
"""

import logging

import peft
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
)

from lrlhf.models import sequence_logprobs
from lrlhf.rollout import Sampling, TransformersEngine
from tests.rollout.test_transformers_engine import gap, generate

SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
DISTURBED = {
    # mixes the rows of a batch when it decodes
    "rwkv": {"attention_hidden_size": 32},
    # its states are no part of the cache, and take the padding in
    "recurrent_gemma": {"lru_width": 32, "block_types": ["recurrent", "attention"]},
    # linear attention without a mask
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 2,
        "head_dim": 8,
        "block_size": 4,
    },
}


def build(family: str) -> PreTrainedModel:
    options = {
        key: value
        for key, value in SIZES.items()
        if (family, key) != ("rwkv", "num_attention_heads")
    }
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **options, **DISTURBED[family])
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model.eval()


@pytest.mark.parametrize("family", DISTURBED)
def test_responses_are_drawn_from_the_policy_whatever_a_batch_does_to_the_model(
    family: str, tokenizer, caplog
) -> None:
    model, engine = build(family), TransformersEngine()
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
    assert engine._way.shares_prompts


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
    assert engine._way.shares_prompts
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
    assert not engine._way.shares_prompts


def test_weights_that_are_not_finite_are_left_to_the_guard(language_model, tokenizer) -> None:
    with torch.no_grad():
        language_model.model.norm.weight.fill_(torch.nan)
    engine = TransformersEngine()
    rollout = generate(language_model, tokenizer, Sampling(max_new_tokens=2), engine=engine)
    assert not engine.capabilities.exact
    assert rollout.sampling_logprobs[rollout.response_mask].isnan().all()
