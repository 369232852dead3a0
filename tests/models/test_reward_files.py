import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerBase,
)

from lrlhf.models import HeadedBackbone, LoRA, RewardNetwork, ScoreModel, StockClassifier
from tests.models.families import left_padded, right_padded

SIZES = {
    "vocab_size": 260,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "num_labels": 1,
}


def perturbed(net: RewardNetwork) -> RewardNetwork:
    """As if it had been trained."""
    with torch.no_grad():
        for weight in net.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn(weight.shape))
    return net


OPTIONS = [
    {"dtype": "bfloat16"},
    {"heads": ["helpful", "honest"], "pooling": "mean", "head": "mlp", "layer": 1},
    {"pooling": "attention", "learn_scale": True, "scale_max": 5.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_loaded_network_gives_exactly_the_scores_of_the_saved_one(
    options: dict[str, object],
    model_folder: str,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    net, batch = perturbed(ScoreModel(source=model_folder, **options).load()), right_padded([9, 6])
    net.save_pretrained(tmp_path, tokenizer)
    torch.manual_seed(99)
    restored = RewardNetwork.from_pretrained(tmp_path)
    assert restored.head_names == net.head_names
    assert torch.equal(restored(batch), net(batch))
    assert not restored.training
    assert not any(weight.requires_grad for weight in restored.parameters())
    assert not list(tmp_path.glob("*.bin"))


@pytest.mark.parametrize("lora", [None, LoRA(r=2)])
def test_one_linear_head_on_the_last_token_is_a_plain_sequence_classifier(
    lora: LoRA | None, model_folder: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    net = perturbed(ScoreModel(source=model_folder, heads=["quality"], lora=lora).load())
    batch = right_padded([9, 6])
    net.save_pretrained(tmp_path, tokenizer)
    plain, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=1, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    logits = plain(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()
    ).logits.detach()
    assert_close(logits, net(batch).detach(), rtol=1e-4, atol=1e-4)
    # the index leaves out the head's own file, which engines would take for weights as well
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == load_file(tmp_path / "model.safetensors").keys()
    assert {*index.values()} == {"model.safetensors"}
    assert len([*tmp_path.glob("*.safetensors")]) == 2


@pytest.mark.parametrize(
    ("model", "config", "scorer"),
    [
        (LlamaForSequenceClassification, LlamaConfig, HeadedBackbone),
        (BertForSequenceClassification, BertConfig, StockClassifier),
    ],
)
def test_a_classifier_of_the_hub_gives_its_own_scores(
    model: Any, config: Any, scorer: type, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    plain, batch = model(config(**SIZES)).eval(), right_padded([9, 6])
    plain.save_pretrained(tmp_path / "hub")
    mask = batch.attention_mask.long()
    expected = plain(input_ids=batch.input_ids, attention_mask=mask).logits.detach()
    net = RewardNetwork.from_pretrained(tmp_path / "hub")
    assert isinstance(net.scorer, scorer)
    assert net.head_names == ("reward",)
    for rows in (batch, left_padded(batch)):
        assert_close(net(rows), expected, rtol=1e-5, atol=1e-5)
    net.save_pretrained(tmp_path / "again", tokenizer)
    assert torch.equal(RewardNetwork.from_pretrained(tmp_path / "again")(batch), net(batch))
    model(config(**{**SIZES, "num_labels": 3})).save_pretrained(tmp_path / "several")
    with pytest.raises(ValueError, match="is no reward model"):
        RewardNetwork.from_pretrained(tmp_path / "several")


def test_heads_that_do_not_fit_their_description_are_refused(
    model_folder: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    ScoreModel(source=model_folder).load().save_pretrained(tmp_path, tokenizer)
    path = tmp_path / "reward_head.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "names": ["other"]}))
    with pytest.raises(ValueError, match=r"reward_head.safetensors does not fit.*other"):
        RewardNetwork.from_pretrained(tmp_path)
    path.write_text(json.dumps({**stored, "colour": "red"}))
    with pytest.raises(ValueError, match="another version of lrlhf: colour"):
        RewardNetwork.from_pretrained(tmp_path)
