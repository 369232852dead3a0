"""What a LoRA policy gives an engine that adds the adapter itself."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, VeraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import PreTrainedModel

from lrlhf.models import save_model
from lrlhf.rollout import PolicyWeights
from lrlhf.rollout.engines.policy_weights import AdapterWeights
from lrlhf.vllm_worker.model_access import PREFIX
from tests.models.text_families import tiny_model


def adapted(model: PreTrainedModel, **options: Any) -> PeftModel:
    """With random adapters: as PEFT makes them they change nothing."""
    return get_peft_model(
        model, LoraConfig(**{"r": 3, "init_lora_weights": False, "lora_alpha": 6} | options)
    )


@pytest.mark.parametrize("rslora", [False, True])
def test_names_values_and_settings_are_those_of_pefts_files(
    language_model, tmp_path: Path, rslora: bool
) -> None:
    policy = adapted(language_model, target_modules="all-linear", use_rslora=rslora)
    policy.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "adapter_model.safetensors")
    adapter = AdapterWeights(PolicyWeights(policy))
    found = dict(adapter.tensors(torch.float32))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    half = adapter.tensors(torch.bfloat16)
    assert [(name, one.shape, one.dtype) for name, one in half] == [
        (name, one.shape, one.dtype) for name, one in adapter.layout(torch.bfloat16)
    ]
    told = json.loads(adapter.settings)
    assert told["r"] == adapter.rank == 3
    # 6 / 3, or with the rank's root 6 / sqrt(3), which vLLM divides by the rank again
    assert told["lora_alpha"] == pytest.approx(6 * 3**0.5 if rslora else 6)
    modules = {name.split(".")[-3] for name in expected}
    assert set(told["target_modules"]) == modules


def test_the_weights_without_the_adapter_are_those_of_the_model_before(language_model) -> None:
    before = dict(PolicyWeights(language_model).tensors())
    before = {name: value.clone() for name, value in before.items()}
    weights = PolicyWeights(adapted(language_model, target_modules=["q_proj", "down_proj"]))
    found = dict(weights.tensors(adapters=False))
    assert list(found) == list(before)
    assert all(torch.equal(found[name], value) for name, value in before.items())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(dict(weights.tensors())[name], found[name])


def test_names_are_those_of_checkpoints_where_they_differ_in_memory(tmp_path: Path) -> None:
    policy = adapted(tiny_model("gpt_neox"), target_modules=["dense_h_to_4h"])
    save_model(policy, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name, _ in AdapterWeights(PolicyWeights(policy)).layout(torch.float32):
        module = re.sub(r"\.lora_[AB]\.weight$", "", name.removeprefix(PREFIX))
        assert f"{module}.weight" in stored


def trains_a_norm() -> PeftModel:
    policy = adapted(tiny_model("llama"), target_modules=["q_proj"])
    policy.get_parameter("base_model.model.model.norm.weight").requires_grad_(True)
    return policy


def two_at_once() -> PeftModel:
    policy = adapted(tiny_model("llama"), target_modules=["q_proj"])
    policy.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    policy.base_model.set_adapter(["default", "second"])
    return policy


def with_vera() -> PeftModel:
    return get_peft_model(tiny_model("llama"), VeraConfig(r=2, target_modules=["q_proj"]))


def conv() -> PeftModel:
    return adapted(tiny_model("gpt2"), target_modules=["c_attn"], fan_in_fan_out=True)


def with_bias() -> PeftModel:
    return adapted(tiny_model("gpt_neox"), target_modules=["dense_h_to_4h"], lora_bias=True)


def plain(**options: Any) -> Callable[[], PeftModel]:
    return lambda: adapted(tiny_model("llama"), **options)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (partial(tiny_model, "llama"), "0 adapters are active, not one"),
        (two_at_once, "2 adapters are active, not one"),
        (with_vera, "of the kind Linear"),
        (plain(target_modules=["q_proj"], use_dora=True), r"q_proj, it is a variant of LoRA"),
        (with_bias, "dense_h_to_4h, it has a bias"),
        (plain(target_modules=["embed_tokens"]), "embed_tokens, it is on a layer of the kind Emb"),
        (
            plain(target_modules=["q_proj"], modules_to_save=["down_proj"]),
            r"down_proj is trained as a whole \(modules_to_save\)",
        ),
        (plain(target_modules=["lm_head"]), "outside of the decoder"),
        (plain(target_modules=["q_proj"], r=513), "rank is 513, and vLLM's limit is 512"),
        (
            plain(target_modules=["q_proj", "k_proj"], alpha_pattern={"k_proj": 7}),
            "scaled by other factors in some layers",
        ),
        (conv, "the kind Conv1D"),
        (trains_a_norm, r"model\.norm\.weight, which is not the adapter's, is trained too"),
    ],
)
def test_what_vllm_could_not_add_is_named(build: Callable[[], Any], reason: str) -> None:
    weights = PolicyWeights(build())
    with pytest.raises(ValueError, match=reason):
        AdapterWeights(weights)
