import json
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerBase,
)

from lrlhf.models import LoRA, RewardNetwork, ScoreModel, StockClassifier
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
    {},
    {"heads": ["helpful", "honest"]},
    {"pooling": "mean"},
    {"pooling": "attention", "learn_scale": True, "scale_max": 5.0},
    {"head": "mlp", "layer": 1},
    {"dtype": "bfloat16"},
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


def test_a_hub_decoder_classifier_loads_and_gives_its_own_scores(tmp_path: Path) -> None:
    plain = LlamaForSequenceClassification(LlamaConfig(**SIZES)).eval()
    plain.save_pretrained(tmp_path)
    batch = right_padded([9, 6])
    expected = plain(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits
    net = RewardNetwork.from_pretrained(tmp_path)
    assert net.head_names == ("reward",)
    assert_close(net(batch), expected.detach(), rtol=1e-5, atol=1e-5)
    assert_close(net(left_padded(batch)), expected.detach(), rtol=1e-5, atol=1e-5)


def test_a_hub_encoder_classifier_runs_as_its_class_defines_it(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    plain = BertForSequenceClassification(BertConfig(**SIZES)).eval()
    plain.save_pretrained(tmp_path / "hub")
    batch = right_padded([9, 6])
    expected = plain(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()
    ).logits.detach()
    net = RewardNetwork.from_pretrained(tmp_path / "hub")
    assert isinstance(net.scorer, StockClassifier)
    assert_close(net(batch), expected, rtol=1e-5, atol=1e-5)
    net.save_pretrained(tmp_path / "again", tokenizer)
    again = RewardNetwork.from_pretrained(tmp_path / "again")
    assert torch.equal(again(batch), net(batch))


def test_a_classifier_with_several_labels_is_no_reward_model(tmp_path: Path) -> None:
    config = BertConfig(**{**SIZES, "num_labels": 3})
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is no reward model"):
        RewardNetwork.from_pretrained(tmp_path)


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
