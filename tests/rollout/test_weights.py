import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.models import save_model
from lrlhf.rollout import PolicyWeights, WeightSyncError
from lrlhf.rollout.engines.policy_weights import compare_fingerprints
from tests.conftest import build_language_model
from tests.models.text_families import tiny_model


def untied(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = copy.deepcopy(build_language_model(tokenizer).config)
    config.tie_word_embeddings = False
    return LlamaForCausalLM(config).eval()


def adapted(model: PreTrainedModel, **options: Any) -> PeftModel:
    """With random adapters: as PEFT makes them they change nothing."""
    config = LoraConfig(r=2, init_lora_weights=False, **options)
    with warnings.catch_warnings():
        # of a tied layer with an adapter, which is what some tests are about
        warnings.simplefilter("ignore")
        return get_peft_model(model, config)


@pytest.mark.parametrize(
    ("tied", "target_modules"), [(True, "all-linear"), (False, ["down_proj", "lm_head"])]
)
def test_adapters_are_merged_as_peft_merges_them(
    tokenizer, tied: bool, target_modules: Any
) -> None:
    policy = adapted(
        build_language_model(tokenizer) if tied else untied(tokenizer),
        target_modules=target_modules,
    )
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    tensors = dict(PolicyWeights(policy).tensors())
    merged = copy.deepcopy(policy).merge_and_unload().state_dict()
    if tied:  # once, under the name of the embedding
        del merged["lm_head.weight"]
    assert sorted(tensors) == sorted(merged)
    for name, expected in merged.items():
        torch.testing.assert_close(tensors[name], expected, rtol=0, atol=1e-6, msg=name)
    changed = "model.layers.1.mlp.down_proj"
    base = before[f"base_model.model.{changed}.base_layer.weight"]
    assert not torch.allclose(tensors[f"{changed}.weight"], base, atol=1e-3)
    layout = {name: one.shape for name, one in PolicyWeights(policy).layout(torch.float32)}
    assert list(layout.items()) == [(name, one.shape) for name, one in tensors.items()]
    # and the adapters are as they were
    after = policy.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_are_read_when_asked_for_and_cast_where_they_are_numbers(
    language_model, dtype: torch.dtype | None
) -> None:
    language_model.model.register_buffer("steps", torch.tensor([3]))
    weights = PolicyWeights(language_model)
    with torch.no_grad():
        language_model.model.norm.weight.fill_(5.0)
    read = dict(weights.tensors(dtype))
    # the output layer is tied, and comes once under the name of the embedding
    assert sorted(read) == sorted([*dict(language_model.named_parameters()), "model.steps"])
    assert read.pop("model.steps").dtype == torch.int64
    for name, tensor in read.items():
        own = language_model.get_parameter(name)
        assert tensor.dtype == (dtype or torch.float32)
        assert torch.equal(tensor, own.to(tensor.dtype))
        assert (tensor.data_ptr() == own.data_ptr()) == (dtype is None)  # no needless copy
        assert not tensor.requires_grad


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"target_modules": ["lm_head"]}, "output layer has"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, "embedding has"),
    ],
)
def test_an_adapter_on_one_of_two_tied_layers_is_refused(
    language_model, options: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(ValueError, match=rf"{culprit}.*policy\.lora\.target_modules"):
        PolicyWeights(adapted(language_model, **options))


# ------------------------------------------------------------------ names of checkpoints


# weights that are cut, renamed, and put together
@pytest.mark.parametrize(
    ("family", "lora"), [("deepseek_v3", False), ("gpt_neox", True), ("hrm_text", True)]
)
def test_names_and_values_are_those_of_the_files_of_an_export(
    family: str, lora: bool, tmp_path: Path
) -> None:
    policy = tiny_model(family)
    if lora:
        policy = adapted(policy, target_modules="all-linear")
    save_model(policy, tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    weights = PolicyWeights(policy)
    tensors = dict(weights.tensors())
    assert sorted(tensors) == sorted(expected)
    for name, value in expected.items():
        assert torch.equal(tensors[name], value), name
    # and known before any is put together, in the order in which they come
    told = [(name, one.shape, one.dtype) for name, one in weights.layout(torch.bfloat16)]
    sent = [(name, one.shape, one.dtype) for name, one in weights.tensors(torch.bfloat16)]
    assert told == sent
    assert all(one.is_meta for _, one in weights.layout(torch.bfloat16))


# ------------------------------------------------------------------ comparison


EXPECTED = {"z.first": "1", "m.second": "2", "a.third": "3"}


@pytest.mark.parametrize(
    ("arrived", "message"),
    [
        # the first in the model's order, not in the engine's or by name
        ({"a.third": "0", "m.second": "0", "z.first": "1"}, "other values of the weight m.second"),
        ({"a.third": "0", "z.first": "1"}, "was not given the weight m.second"),
        (EXPECTED | {"extra": "4"}, "a weight extra, which the policy lacks"),
    ],
)
def test_the_first_wrong_weight_is_named(arrived: dict[str, str], message: str) -> None:
    compare_fingerprints(EXPECTED, dict(reversed(EXPECTED.items())))
    with pytest.raises(WeightSyncError, match=message.replace(".", r"\.")):
        compare_fingerprints(EXPECTED, arrived)
