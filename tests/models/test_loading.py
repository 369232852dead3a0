import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerBase,
)

from lrlhf.models import CausalLM, LoRA, ScoreModel, check_mergeable, save_model, sequence_logprobs
from lrlhf.models.loading.meta import skeleton
from lrlhf.models.loading.pretrained import _keep_4_bit_layout
from tests.models.families import right_padded


def test_dropout_is_off_by_default_also_in_training_mode(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.5
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model, batch = CausalLM(source=str(tmp_path)).load().train(), right_padded([9, 6])
    assert torch.equal(sequence_logprobs(model, batch), sequence_logprobs(model, batch))
    assert (model.config.attn_pdrop, model.config.resid_pdrop) == (0.0, 0.0)
    kept = CausalLM(source=str(tmp_path), dropout=True).load()
    assert {m.p for m in kept.modules() if isinstance(m, nn.Dropout)} == {0.5}


def trainable_names(model: nn.Module) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def test_lora_options_reach_the_layers(model_folder: str) -> None:
    lora = LoRA(target_modules=["q_proj"], modules_to_save=["o_proj"], dropout=0.25)
    model = CausalLM(source=model_folder, dtype="bfloat16", lora=lora).load()
    names = trainable_names(model)
    # 2 blocks: adapters A and B of one layer, a whole copy of another
    assert len([name for name in names if "q_proj.lora_" in name]) == 4
    assert len([name for name in names if "o_proj.modules_to_save" in name]) == 2
    assert len(names) == 6
    dropouts = {m.p for m in model.modules() if isinstance(m, nn.Dropout)}
    assert dropouts == {0.25}
    adapters = {w.dtype for name, w in model.named_parameters() if "lora_" in name}
    assert adapters == {torch.float32}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quantization": "4bit"}, "quantization: 4bit cannot train"),
        ({"quantization": "8bit"}, "quantization: 8bit cannot train"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    model_folder: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        CausalLM(source=model_folder, **options).load()


ENDS = [
    {"target_modules": ["lm_head"]},
    {"target_modules": ["q_proj", "model.embed_tokens"]},
    {"target_modules": r".*\.(embed_tokens|q_proj)"},
    {"modules_to_save": ["embed_tokens"]},
    {"modules_to_save": ["embed_tokens", "lm_head"]},
]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # PEFT's own word
@pytest.mark.parametrize("options", ENDS, ids=str)
def test_an_end_of_tied_weights_gets_no_adapter_however_it_is_spelt(
    options: dict[str, Any], model_folder: str
) -> None:
    spec = CausalLM(source=model_folder, lora=LoRA(r=2, **options))
    for build in (spec.load, lambda: skeleton(spec)):
        with pytest.raises(ValueError, match=r"lora: .*(embed_tokens|lm_head) shares its weights"):
            build()
    # a model that is already built
    config = peft.LoraConfig(r=2, **{"target_modules": ["q_proj"], **options})
    adapted = peft.get_peft_model(CausalLM(source=model_folder).load(), config)
    with pytest.raises(ValueError, match="shares its weights"):
        check_mergeable(adapted)


def test_a_body_has_one_end_alone(model_folder: str) -> None:
    lora = LoRA(r=2, target_modules=["embed_tokens"])
    assert len(trainable_names(ScoreModel(source=model_folder, lora=lora).load())) == 3


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_ends_go_by_other_names_too(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2)
    ).save_pretrained(tmp_path)
    lora = LoRA(r=2, target_modules=["wte", "c_attn"])
    with pytest.raises(ValueError, match=r"lora: transformer\.wte shares its weights"):
        CausalLM(source=str(tmp_path), lora=lora).load()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target_modules": ["qq_proj"]}, "qq_proj"),
        ({"target_modules": ["q_proj", "v_prj"]}, "'v_prj' is the name of no module.*v_proj"),
        ({"target_modules": ["q_proj", "layers.7.self_attn.v_proj"]}, "'layers.7.self_attn.v_proj"),
        ({"target_modules": ["_proj"]}, "_proj"),
        ({"target_modules": r".*\.(q_proj"}, "lora does not fit .* unterminated"),
        ({"modules_to_save": ["nrom"]}, "lora.modules_to_save: 'nrom'.*norm"),
        ({"modules_to_save": ["norm", "score"]}, "lora.modules_to_save: 'score'"),
    ],
)
def test_names_of_no_module_are_refused_before_weights_and_after(
    options: dict[str, Any], said: str, model_folder: str, tmp_path: Path
) -> None:
    lora = LoRA(r=2, **options)
    CausalLM(source=model_folder).load().config.save_pretrained(tmp_path)  # without weights
    for source in (model_folder, str(tmp_path)):
        spec = CausalLM(source=source, lora=lora)
        body = ScoreModel(source=source, lora=lora)
        for build in (lambda spec=spec: skeleton(spec), spec.load, body.load):
            with pytest.raises(ValueError, match=said):
                build()


def test_a_pattern_may_be_of_several_models_and_what_it_lacks_is_named(
    model_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    for pattern, lacks in ((r".*\.(q_proj|v_prj)", "v_prj"), (r"model\.layers\.\d+\..*q_proj", "")):
        caplog.clear()
        with caplog.at_level("WARNING", logger="lrlhf"):
            CausalLM(source=model_folder, lora=LoRA(r=2, target_modules=pattern)).load()
        assert f"no layer has {lacks} in" in caplog.text if lacks else not caplog.text


@pytest.mark.parametrize("lora", [None, LoRA(r=2)])
def test_recomputing_activations_changes_no_gradient(model_folder: str, lora: LoRA | None) -> None:
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        spec = CausalLM(source=model_folder, lora=lora, gradient_checkpointing=checkpointing)
        model = spec.load().train()
        assert model.is_gradient_checkpointing == checkpointing
        sequence_logprobs(model, right_padded([9, 6])).sum().backward()
        gradients.append({n: w.grad for n, w in model.named_parameters() if w.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert_close(gradients[1][name], gradient, msg=name)


def test_a_folder_that_lacks_weights_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = BertModel(BertConfig(vocab_size=len(tokenizer), num_hidden_layers=1, **sizes))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "is_decoder": True}))
    with pytest.raises(ValueError, match=r"does not fill BertLMHeadModel: missing \['cls"):
        CausalLM(source=str(tmp_path)).load()


def test_code_beside_a_model_runs_only_if_the_user_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "odd", "auto_map": {"AutoConfig": "odd.OddConfig"}})
    )
    (tmp_path / "odd.py").write_text("raise ZeroDivisionError('the code ran')")
    with pytest.raises(ValueError, match="trust_remote_code"):
        CausalLM(source=str(tmp_path)).load()
    with pytest.raises(ZeroDivisionError, match="the code ran"):
        CausalLM(source=str(tmp_path), trust_remote_code=True).load()


def test_4_bit_layers_do_not_pack_their_weights_anew_on_any_processor() -> None:
    layer = nn.Module()
    layer.support_avx512bf16_for_cpu = True  # as bitsandbytes sets it where there is AVX512-BF16
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(layer))
    _keep_4_bit_layout(model)
    assert layer.support_avx512bf16_for_cpu is False
    assert not hasattr(model[0], "support_avx512bf16_for_cpu")


def test_adapters_on_a_4_bit_model_learn_and_its_weights_stay(model_folder: str) -> None:
    spec = CausalLM(source=model_folder, quantization="4bit", lora=LoRA(r=4))
    model, batch = spec.load(), right_padded([9, 6])
    names = trainable_names(model)
    assert names
    assert all("lora_" in name for name in names)
    frozen = {n: w.detach().clone() for n, w in model.named_parameters() if n not in names}
    assert torch.uint8 in {weight.dtype for weight in frozen.values()}
    optimizer = torch.optim.Adam([w for w in model.parameters() if w.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = -sequence_logprobs(model, batch).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, weight in model.named_parameters():
        if name in frozen:
            assert torch.equal(weight, frozen[name]), name


@pytest.mark.parametrize("target", [["q_proj", "down_proj"], "all-linear"])
def test_a_saved_model_with_adapters_is_a_plain_one_with_the_same_logprobs(
    model_folder: str,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    target: str | list[str],
) -> None:
    lora = LoRA(r=2, target_modules=target, modules_to_save=["norm"])
    model, batch = CausalLM(source=model_folder, lora=lora).load(), right_padded([9, 6])
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn(weight.shape))
    expected = sequence_logprobs(model, batch)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_model(model, tmp_path, tokenizer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    restored = CausalLM(source=str(tmp_path)).load()
    assert not isinstance(restored, PeftModel)
    assert_close(sequence_logprobs(restored, batch), expected, rtol=1e-4, atol=1e-4)
    assert len(CausalLM(source=str(tmp_path)).load_tokenizer()) == len(tokenizer)


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_a_saved_quantised_model_is_a_plain_one_with_about_the_same_logprobs(
    model_folder: str, tmp_path: Path, bits: str
) -> None:
    # only some layers carry adapters, all linear ones are quantised
    lora = LoRA(r=2, target_modules=["q_proj"])
    model = CausalLM(source=model_folder, quantization=bits, lora=lora).load()
    batch = right_padded([9, 6])
    save_model(model, tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    restored = CausalLM(source=str(tmp_path)).load()
    # int8 rounds the activations too, which the restored weights do not
    tolerance = {"4bit": 1e-3, "8bit": 0.1}[bits]
    expected = sequence_logprobs(model, batch)
    assert_close(sequence_logprobs(restored, batch), expected, rtol=tolerance, atol=tolerance)


def test_a_body_without_its_head_loads_without_a_remark(
    model_folder: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    classifier = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1)
    classifier.save_pretrained(tmp_path)
    capfd.readouterr()
    AutoModel.from_pretrained(tmp_path)
    assert "score.weight" in capfd.readouterr().err  # what transformers says of it
    ScoreModel(source=str(tmp_path)).load()
    assert "score.weight" not in capfd.readouterr().err
