from typing import Any

import peft
import pytest
import torch
from torch.testing import assert_close
from transformers import PreTrainedModel

from lrlhf.models import CausalLM, LoRA, frozen_reference, sequence_logprobs
from tests.models.families import right_padded


@pytest.fixture
def adapted(model_folder: str) -> peft.PeftModel:
    """A policy with adapters that have learnt something."""
    model = CausalLM(source=model_folder, lora=LoRA(r=2)).load()
    learn(model)
    return model


@torch.no_grad()
def learn(model: peft.PeftModel) -> None:
    for weight in model.parameters():
        if weight.requires_grad:
            weight.add_(torch.randn(weight.shape))


def shift(model: PreTrainedModel, amount: float) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(amount)


def test_a_copy_keeps_what_the_policy_was(language_model: PreTrainedModel) -> None:
    batch = right_padded([9, 6])
    before = sequence_logprobs(language_model, batch, temperature=0.5).detach()
    reference = frozen_reference(language_model)
    shift(language_model, 0.1)
    actual = reference.logprobs(batch, temperature=0.5)
    assert torch.equal(actual, before)
    assert not actual.requires_grad
    assert not torch.allclose(sequence_logprobs(language_model, batch, temperature=0.5), before)


def test_with_new_adapters_it_is_the_model_below_them(
    model_folder: str, language_model: PreTrainedModel
) -> None:
    batch = right_padded([9, 6])
    expected = sequence_logprobs(language_model, batch).detach()
    policy = CausalLM(source=model_folder, lora=LoRA(r=2, modules_to_save=["norm"])).load()
    reference = frozen_reference(policy)
    learn(policy)
    assert_close(reference.logprobs(batch), expected)
    assert not torch.allclose(sequence_logprobs(policy, batch), expected)
    assert reference.state_dict() == {}


def test_with_adapters_that_have_learnt_it_is_the_policy_as_it_starts(
    adapted: peft.PeftModel,
) -> None:
    batch = right_padded([9, 6])
    expected = sequence_logprobs(adapted, batch).detach()
    names = list(adapted.state_dict())
    reference = frozen_reference(adapted)
    learn(adapted)
    now = sequence_logprobs(adapted, batch).detach()
    assert torch.equal(reference.logprobs(batch), expected)
    assert torch.equal(sequence_logprobs(adapted, batch), now)
    assert not torch.allclose(now, expected, atol=0.1)
    # nothing of it is stored, exported or trained
    assert reference.state_dict() == {}
    assert list(adapted.state_dict()) == names


@pytest.mark.parametrize(
    "options",
    [{"init_lora_weights": "pissa"}, {"use_dora": True}, {"modules_to_save": ["norm"]}],
)
def test_adapters_that_start_with_an_effect_are_part_of_it(
    language_model: PreTrainedModel, options: dict[str, Any]
) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
    policy = peft.get_peft_model(language_model, config)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "modules_to_save" in name:
                weight.mul_(3)
    batch = right_padded([9, 6])
    expected = sequence_logprobs(policy, batch).detach()
    reference = frozen_reference(policy)
    learn(policy)
    assert torch.equal(reference.logprobs(batch), expected)


def test_asking_the_reference_changes_nothing_of_the_policy(adapted: peft.PeftModel) -> None:
    adapted.train()
    frozen = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    adapted.get_parameter(frozen).requires_grad_(False)
    adapted.base_model.model.model.layers[0].eval()
    trainable = {name: w.requires_grad for name, w in adapted.named_parameters()}
    modes = [module.training for module in adapted.modules()]
    batch = right_padded([9, 6])
    loss = sequence_logprobs(adapted, batch).sum()
    frozen_reference(adapted).logprobs(batch)
    loss.backward()  # a pending gradient survives it
    assert {name: w.requires_grad for name, w in adapted.named_parameters()} == trainable
    assert {name: w.grad is not None for name, w in adapted.named_parameters()} == trainable
    assert [module.training for module in adapted.modules()] == modes


def test_a_mixed_reference_survives_a_checkpoint(language_model: PreTrainedModel) -> None:
    batch = right_padded([9, 6])
    reference = frozen_reference(language_model)
    fresh = frozen_reference(language_model)
    assert reference.state_dict() == {}
    start = {name: w.detach().clone() for name, w in language_model.named_parameters()}
    shift(language_model, 1.0)
    reference.mix(language_model, 0.25)
    # 0.25 · (w + 1) + 0.75 · w = w + 0.25
    for name, weight in start.items():
        assert_close(reference.state_dict()[name], weight + 0.25)
    fresh.load_state_dict(reference.state_dict())
    assert torch.equal(fresh.logprobs(batch), reference.logprobs(batch))
    # and goes on being saved
    assert fresh.state_dict().keys() == reference.state_dict().keys()


def test_mixing_is_refused_with_lora(adapted: peft.PeftModel) -> None:
    reference = frozen_reference(adapted)
    with pytest.raises(ValueError, match="cannot follow the policy"):
        reference.mix(adapted, 0.5)
    with pytest.raises(ValueError, match="without lora"):
        reference.load_state_dict({"weight": torch.zeros(1)})
