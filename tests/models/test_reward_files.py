import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    CTRLConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerBase,
    RobertaConfig,
    XLNetConfig,
)

from lrlhf.models import HeadedBackbone, LoRA, RewardNetwork, ScoreModel, StockClassifier
from lrlhf.modules import RewardModel
from lrlhf.rewards import LearnedReward
from lrlhf.types import SequenceBatch
from tests.conftest import build_language_model, byte_tokenizer
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


TEXTS = ["2+2=4", "a", "much longer than the others"]
END, PAD = "<|end|>", "<|filler|>"


def ended_by(pad: str | None) -> PreTrainedTokenizerBase:
    """A tokenizer that pads with such a token; its texts end in another, or in this one."""
    tokenizer = byte_tokenizer([PAD, END], END)
    tokenizer.pad_token = pad
    return tokenizer


def scored_by_transformers(folder: Path, *, padded: bool) -> torch.Tensor:
    """Score texts as a user of the folder would: alone, or in one batch."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    texts = [text + tokenizer.eos_token for text in TEXTS]
    batches = [texts] if padded else [[text] for text in texts]
    with torch.no_grad():
        scores = [
            model(**tokenizer(batch, padding=padded, return_tensors="pt")).logits[:, 0]
            for batch in batches
        ]
    return torch.cat(scores)


def network_scores(net: RewardNetwork, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Score the same token ids, padded with a token that says nothing."""
    rows = [tokenizer(text + END)["input_ids"] for text in TEXTS]
    width = max(map(len, rows))
    ids = torch.tensor([row + [7] * (width - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    batch = SequenceBatch(input_ids=ids, attention_mask=mask, response_mask=mask)
    with torch.no_grad():
        return torch.cat([net(batch)[:, 0], net(left_padded(batch))[:, 0]])


@pytest.mark.parametrize("room", [0, 3], ids=["no row left", "rows left"])
@pytest.mark.parametrize("pad", [PAD, END, None, "<|beyond|>"])
def test_an_export_scores_in_transformers_as_here(
    pad: str | None, room: int, tmp_path: Path
) -> None:
    tokenizer = ended_by(PAD)
    build_language_model(tokenizer, vocab_size=len(tokenizer) + room).save_pretrained(tmp_path)
    other = ended_by(pad if pad != "<|beyond|>" else PAD)
    if pad == "<|beyond|>":  # the model was not resized
        other.add_tokens([f"<|{number}|>" for number in range(room)], special_tokens=True)
        other.add_special_tokens({"pad_token": pad})
    other.save_pretrained(tmp_path)
    module = RewardModel(str(tmp_path))
    here = network_scores(perturbed(module.network).eval(), module.tokenizer)
    module.save_pretrained(tmp_path / "export")
    for padded in (False, True):
        there = scored_by_transformers(tmp_path / "export", padded=padded)
        assert_close(torch.cat([there, there]), here, rtol=1e-4, atol=1e-4)
    again = RewardNetwork.from_pretrained(tmp_path / "export")
    assert_close(network_scores(again, module.tokenizer), here, rtol=1e-5, atol=1e-5)
    assert len(set(here.tolist())) > 1


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2}
HEADS = {"num_attention_heads": 4, "intermediate_size": 64, **SMALL}
FOREIGN = {
    "llama": (LlamaConfig, HEADS),
    "gpt2": (GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}),
    "ctrl": (CTRLConfig, {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 64}),
    "bert": (BertConfig, HEADS),
    "roberta": (RobertaConfig, HEADS),
    "xlnet": (XLNetConfig, {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
}


@pytest.mark.parametrize("config_pad", [PAD, END, None])
@pytest.mark.parametrize("family", FOREIGN)
def test_classifiers_of_others_score_as_in_transformers(
    family: str, config_pad: str | None, tmp_path: Path
) -> None:
    if family in ("bert", "roberta", "xlnet") and config_pad != PAD:
        pytest.skip("an encoder's own padding is not its end")
    tokenizer = ended_by(config_pad or END)
    pad = None if config_pad is None else tokenizer.convert_tokens_to_ids(config_pad)
    config_class, sizes = FOREIGN[family]
    config = config_class(vocab_size=len(tokenizer), num_labels=1, **sizes)
    config.pad_token_id, config.bos_token_id = pad, None
    config.eos_token_id = tokenizer.eos_token_id
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
    model.save_pretrained(tmp_path / "of others")
    tokenizer.save_pretrained(tmp_path / "of others")
    there = scored_by_transformers(tmp_path / "of others", padded=False)
    net = RewardNetwork.from_pretrained(tmp_path / "of others")
    assert_close(network_scores(net, tokenizer), there.repeat(2), rtol=1e-4, atol=1e-4)
    reward = LearnedReward(str(tmp_path / "of others"))
    answers = reward(prompts=[""] * 3, completions=TEXTS, log_metric=lambda *_: None)
    assert torch.tensor(answers) == pytest.approx(there, rel=1e-3, abs=1e-4)
    # trained further, it goes on reading the same token, and so does its export
    module = RewardModel(str(tmp_path / "of others"))
    module.save_pretrained(tmp_path / "export")
    for padded in (False, True) if family in ("llama", "gpt2") else ():
        again = scored_by_transformers(tmp_path / "export", padded=padded)
        assert_close(again, there, rtol=1e-4, atol=1e-4)
    net = RewardNetwork.from_pretrained(tmp_path / "export")
    assert_close(network_scores(net, tokenizer), there.repeat(2), rtol=1e-4, atol=1e-4)


def test_labels_that_are_no_score_are_left_out_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    LlamaForSequenceClassification(LlamaConfig(**{**SIZES, "num_labels": 3})).save_pretrained(
        tmp_path
    )
    with caplog.at_level("WARNING", logger="lrlhf"):
        ScoreModel(source=str(tmp_path)).load()
    assert "is a classifier with 3 labels" in caplog.text


def test_a_folder_from_before_reads_the_last_token(
    model_folder: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    net = ScoreModel(source=model_folder).load()
    net.save_pretrained(tmp_path, tokenizer)
    path = tmp_path / "reward_head.json"
    stored = json.loads(path.read_text())
    del stored["pad_token_id"]
    path.write_text(json.dumps(stored))
    batch = right_padded([9, 6])
    assert torch.equal(RewardNetwork.from_pretrained(tmp_path)(batch), net(batch))
