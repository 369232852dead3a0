"""Operations of a model's passes, beside PyTorch's own count."""

from __future__ import annotations

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from lrlhf.models.flops import PEAK_FLOPS, peak_flops, training_flops

WIDTH, LAYERS, TOKENS = 128, 2, 48


def _model(**options: object) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=WIDTH,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
        **options,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [True, False])
def test_a_training_pass_has_the_products_that_pytorch_counts(tied: bool) -> None:
    model = _model(tie_word_embeddings=tied)
    ids = torch.randint(512, (1, TOKENS))
    with FlopCounterMode(display=False) as counted:
        model(input_ids=ids).logits.sum().backward()
    # eager attention also multiplies the half that the causal mask hides
    hidden_half = 3 * 2 * LAYERS * WIDTH * TOKENS**2
    expected = counted.get_total_flops() - hidden_half
    assert training_flops(model, TOKENS, TOKENS**2) == pytest.approx(expected, rel=0.01)


def test_weights_that_do_not_learn_have_no_gradients_of_their_own() -> None:
    model = _model()
    full = training_flops(model, TOKENS, 0)
    adapted = get_peft_model(model, LoraConfig(r=1, target_modules=["q_proj"]))
    assert training_flops(adapted, TOKENS, 0) == pytest.approx(full * 2 / 3, rel=0.02)


def test_a_frozen_teacher_has_no_backward_pass() -> None:
    model = _model().requires_grad_(False)
    ids = torch.randint(512, (1, TOKENS))
    with FlopCounterMode(display=False) as counted:
        model(input_ids=ids)
    expected = counted.get_total_flops() - 2 * LAYERS * WIDTH * TOKENS**2  # the hidden half
    assert training_flops(model, TOKENS, TOKENS**2) == pytest.approx(expected, rel=0.01)


def test_experts_have_no_count() -> None:
    model = _model()
    model.config.num_experts = 4
    assert math.isnan(training_flops(model, TOKENS, 0))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Tesla T4", None),
    ],
)
def test_a_gpu_is_known_by_its_name(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == peak
    assert peak_flops(torch.device("cpu")) is None
    assert peak is None or peak in PEAK_FLOPS.values()
