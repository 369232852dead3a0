from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from lrlhf.models import ScoreModel
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
