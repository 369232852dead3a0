"""What is exported computes what the adapted model computes, experts included."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from lrlhf.models import CausalLM, LoRA, save_model
from lrlhf.models.loading.pretrained import finish_for_training
from lrlhf.modules.policy.load_policy import load_policy
from tests.conftest import build_tokenizer
from tests.matrices import few_of
from tests.models.text_families import tiny_model

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10]])
EXPERTS = few_of(["mixtral", "qwen3_moe", "olmoe", "deepseek_v3"], ["mixtral", "deepseek_v3"])


def adapted(family: str, **lora: Any) -> PeftModel:
    """With random adapters: as PEFT makes them they change nothing."""
    spec = CausalLM(source="unused", lora=LoRA(r=2, **lora))
    model = finish_for_training(tiny_model(family), spec, task_type="CAUSAL_LM")
    assert isinstance(model, PeftModel)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.1)
    return model.eval()


@torch.no_grad()
def logits(model: PreTrainedModel | PeftModel) -> torch.Tensor:
    return model(input_ids=TOKENS, use_cache=False).logits


@pytest.mark.parametrize("family", EXPERTS)
def test_an_export_with_experts_computes_what_the_adapted_model_does(
    family: str, tmp_path: Path
) -> None:
    model = adapted(family)
    save_model(model, tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(exported), logits(model), rtol=0, atol=1e-3)
    assert (logits(tiny_model(family)) - logits(model)).abs().max() > 0.1


def test_an_adapter_that_cannot_be_merged_is_refused_before_training() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    model, said = tiny_model("llama"), r"layers\.0\.self_attn\.q_proj cannot be.*variant of LoRA"
    with pytest.raises(ValueError, match=said):
        load_policy(get_peft_model(model, config), build_tokenizer(), None)


@pytest.mark.parametrize("family", ["jamba", "mamba2", "llama4_text", "phimoe"])
def test_every_adapter_on_all_linear_layers_learns(family: str) -> None:
    # of state spaces some layers are read and never called, and some routers return tuples
    model = adapted(family)
    model(input_ids=TOKENS, use_cache=False).logits.square().sum().backward()
    adapters = {name: weight for name, weight in model.named_parameters() if "lora_" in name}
    assert len(adapters) >= 4
    assert [name for name, weight in adapters.items() if weight.grad is None] == []
