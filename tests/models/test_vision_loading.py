"""Vision-language models come from a folder as policy, reward model and critic, and go back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText, AutoProcessor

from lrlhf.media import MediaProcessor
from lrlhf.models import (
    CausalLM,
    LoRA,
    RewardNetwork,
    ScoreModel,
    ValueModel,
    load_processor,
    save_model,
    sequence_logprobs,
)
from tests.vlms import (
    FAMILY_PARAMS,
    QWEN_FAMILIES,
    Vlm,
    batch_of,
    build_vlm,
    plain_logprobs,
    rows_of,
    save_vlm,
)

Folder = Callable[[str], str]

ENCODERS = {
    **dict.fromkeys(QWEN_FAMILIES, "visual"),
    **dict.fromkeys(("llava", "llava_onevision", "gemma3"), "vision_tower"),
    **dict.fromkeys(("smolvlm", "idefics3"), "vision_model"),
}
"""What each family calls its encoder, below its body."""


@pytest.fixture(params=FAMILY_PARAMS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    saved: dict[str, str] = {}

    def folder(family: str) -> str:
        if family not in saved:
            saved[family] = str(tmp_path_factory.mktemp(family))
            save_vlm(family, saved[family])
        return saved[family]

    return folder


def test_a_folder_becomes_the_model_its_tokenizer_and_its_processor(
    family: str, folder_of: Folder
) -> None:
    spec, vlm = CausalLM(source=folder_of(family)), build_vlm(family)
    model, processor = spec.load(), spec.load_processor()
    assert type(model) is type(vlm.model)
    assert type(processor) is type(vlm.processor.processor)
    assert processor is not None
    assert spec.load_tokenizer().get_vocab() == vlm.tokenizer.get_vocab()
    paired = MediaProcessor.for_model(processor, model.config)
    assert paired is not None
    loaded = Vlm(model, processor.tokenizer, paired)
    rows, again = rows_of(vlm), rows_of(loaded)
    for mine, theirs in zip(rows, again, strict=True):
        assert mine.input_ids == theirs.input_ids
    batch = batch_of(again)
    with torch.no_grad():
        found = sequence_logprobs(model, batch)[batch.response_mask]
        plain = torch.cat([plain_logprobs(vlm.model, vlm, entry) for entry in rows])
    assert_close(found, plain, rtol=0, atol=1e-5)


def test_a_text_model_has_no_processor_and_takes_none(model_folder: str, folder_of: Folder) -> None:
    spec = CausalLM(source=model_folder)
    assert spec.load_processor() is None
    processor = load_processor(folder_of("llava"))
    with pytest.raises(ValueError, match="LlavaProcessor was passed for a text model"):
        MediaProcessor.for_model(processor, spec.load().config)
    with pytest.raises(ValueError, match="is a text model: it has no vision encoder"):
        CausalLM(source=model_folder, freeze_vision=True).load()


@pytest.mark.parametrize("spec", [CausalLM, ScoreModel, ValueModel])
def test_freeze_vision_freezes_exactly_the_encoder(
    family: str, folder_of: Folder, spec: Any
) -> None:
    model = spec(source=folder_of(family), freeze_vision=True).load()
    mark = f"{ENCODERS[family]}."
    inside = [mark in name for name, _ in model.named_parameters()]
    assert sum(inside) > 10
    assert [not weight.requires_grad for weight in model.parameters()] == inside


def adapted(model: nn.Module) -> set[str]:
    assert isinstance(model, PeftModel)
    names = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert names
    assert all("lora_" in name for name in names)
    return names


def test_adapters_stay_out_of_a_frozen_encoder_and_go_everywhere_else(
    family: str, folder_of: Folder
) -> None:
    everywhere = adapted(CausalLM(source=folder_of(family), lora=LoRA(r=2)).load())
    outside = adapted(CausalLM(source=folder_of(family), lora=LoRA(r=2), freeze_vision=True).load())
    inside = {name for name in everywhere if f".{ENCODERS[family]}." in name}
    assert inside
    assert outside == everywhere - inside


def test_a_reward_model_trains_all_that_looks_at_images(family: str, folder_of: Folder) -> None:
    network = ScoreModel(source=folder_of(family)).load()
    body = network.scorer.backbone
    assert [name for name, weight in body.named_parameters() if not weight.requires_grad] == []
    network(batch_of(rows_of(build_vlm(family)))).sum().backward()
    encoder = body.get_submodule(ENCODERS[family])
    moved = [w.grad is not None and bool(w.grad.any()) for w in encoder.parameters()]
    assert sum(moved) > len(moved) / 2


def test_a_saved_reward_model_gives_the_same_scores(
    family: str, folder_of: Folder, tmp_path: Path
) -> None:
    vlm = build_vlm(family)
    network = ScoreModel(source=folder_of(family), heads=["a", "b"], lora=LoRA(r=2)).load()
    for name, weight in network.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.2)
    batch = batch_of(rows_of(vlm))
    scores = network(batch).detach()
    network.save_pretrained(tmp_path, vlm.tokenizer)
    vlm.processor.save(tmp_path)
    again = RewardNetwork.from_pretrained(tmp_path)
    assert again.head_names == ("a", "b")
    assert_close(again(batch), scores, rtol=0, atol=1e-4)
    assert type(load_processor(str(tmp_path))) is type(vlm.processor.processor)


@torch.no_grad()
def test_an_exported_policy_is_an_ordinary_model_with_its_processor(
    family: str, folder_of: Folder, tmp_path: Path
) -> None:
    vlm = build_vlm(family)
    model = CausalLM(source=folder_of(family), lora=LoRA(r=2)).load()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.add_(0.05 * torch.randn_like(weight))
    save_model(model, tmp_path)
    vlm.processor.save(tmp_path)
    plain, info = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    processor: Any = AutoProcessor.from_pretrained(tmp_path)
    exported = Vlm(plain, processor.tokenizer, MediaProcessor.of(processor, plain.config))
    for mine, theirs in zip(rows_of(vlm), rows_of(exported), strict=True):
        logits = model(**mine.plain).logits
        assert_close(plain(**theirs.plain).logits, logits, rtol=0, atol=1e-4)
        assert (logits - vlm.model(**mine.plain).logits).abs().max() > 1e-2
