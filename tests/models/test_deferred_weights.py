"""Models whose weights are read after they are built: all of them, on one process."""

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

from lrlhf.models import (
    CausalLM,
    LoRA,
    PretrainedSpec,
    RewardNetwork,
    ScoreModel,
    ValueModel,
    frozen_reference,
    packs,
    plain_model,
    sequence_logprobs,
)
from lrlhf.models.loading.deferred_weights import is_deferred, read, reading
from lrlhf.modules import RLOO
from lrlhf.rewards import Rewards
from lrlhf.strategies import FSDP2
from tests.conftest import build_tokenizer
from tests.models.families import CAUSAL_FAMILIES, llama, right_padded, seeded
from tests.modules.policy_runs import letters
from tests.vlms import build_vlm


def mixtral() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=50, **sizes, **heads, **experts))


def qwen2_vl() -> PreTrainedModel:
    return build_vlm("qwen2_vl").model


later = pytest.mark.usefixtures("_later")
"""Builds models without their weights."""


@pytest.fixture
def _later() -> Iterator[None]:
    with reading(later=True):
        yield


def saved(build: Callable[[], PreTrainedModel], folder: Path) -> dict[str, Tensor]:
    """Write a model; returns its weights, and the buffers that no file holds."""
    model = seeded(build)
    model.save_pretrained(folder)
    return {**dict(model.named_buffers()), **model.state_dict()}


def assert_same(model: nn.Module, expected: dict[str, Tensor]) -> None:
    tensors = {**dict(model.named_buffers()), **model.state_dict()}
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(tensors[name], value), name


@later
@pytest.mark.parametrize("build", [*CAUSAL_FAMILIES, mixtral, qwen2_vl])
def test_what_is_read_later_is_what_was_saved(
    build: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    expected = saved(build, tmp_path)
    model = CausalLM(source=str(tmp_path)).load()
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    duplicate = copy.deepcopy(model)
    for one in (model, duplicate):
        assert is_deferred(one)
        read(one, "cpu")
        assert not is_deferred(one)
        assert_same(one, expected)
        tied = one.get_output_embeddings().weight is one.get_input_embeddings().weight
        assert tied == one.config.get_text_config().tie_word_embeddings


OPTIONS: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"freeze": ["layers.0", "embed_tokens"], "gradient_checkpointing": True},
    {"lora": LoRA(r=2)},
    {"lora": LoRA(r=2, modules_to_save=["mlp"]), "dtype": "bfloat16"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_give_what_they_give_a_loaded_model(
    options: dict[str, Any], tmp_path: Path
) -> None:
    saved(llama, tmp_path)
    models, drawn = [], []
    for later in (False, True):
        torch.manual_seed(5)  # adapters are drawn at random
        with reading(later=later):
            models.append(CausalLM(source=str(tmp_path), **options).load())
        drawn.append(torch.rand(1))
    whole, deferred = models
    assert torch.equal(*drawn)
    assert (is_deferred(deferred), is_deferred(whole)) == (True, False)
    read(deferred, "cpu")
    assert_same(deferred, {**dict(whole.named_buffers()), **whole.state_dict()})
    for (name, ours), (_, theirs) in zip(
        deferred.named_parameters(), whole.named_parameters(), strict=True
    ):
        assert (ours.requires_grad, ours.dtype) == (theirs.requires_grad, theirs.dtype), name
    batch = right_padded([6, 4])
    assert torch.equal(sequence_logprobs(deferred, batch), sequence_logprobs(whole, batch))


@later
def test_trials_wait_for_the_weights(tmp_path: Path) -> None:
    saved(llama, tmp_path)
    model = CausalLM(source=str(tmp_path)).load()
    assert not packs(plain_model(model))
    read(model, "cpu")
    assert packs(plain_model(model))


@later
def test_a_family_whose_logits_are_not_known_is_refused_once_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(llama, tmp_path)
    model = CausalLM(source=str(tmp_path)).load()
    monkeypatch.setattr(type(model), "forward", _doubled(type(model).forward))
    with pytest.raises(ValueError, match="computes its logits"):
        read(model, "cpu")


def _doubled(forward: Callable[..., Any]) -> Callable[..., Any]:
    def twice(*inputs: Any, **options: Any) -> Any:
        output = forward(*inputs, **options)
        output.logits = 2 * output.logits
        return output

    return twice


@later
def test_a_reference_reads_what_its_policy_reads(tmp_path: Path) -> None:
    expected = saved(llama, tmp_path)
    policy = CausalLM(source=str(tmp_path)).load()
    reference = frozen_reference(policy)
    read(policy, "cpu")
    with torch.no_grad():
        for weight in policy.parameters():
            weight.zero_()
    read(reference.model, "cpu")
    assert_same(reference.model, expected)
    assert not any(weight.requires_grad for weight in reference.model.parameters())


@later
def test_adapters_that_do_nothing_are_known_without_the_weights(tmp_path: Path) -> None:
    saved(llama, tmp_path)
    lora = LoRA(r=2, modules_to_save=["mlp"])
    reference = frozen_reference(CausalLM(source=str(tmp_path), lora=lora).load())
    assert vars(reference)["_first"] is None


@pytest.mark.parametrize("layer", [-1, 2])
def test_reward_networks_and_critics_are_read_later_too(layer: int, tmp_path: Path) -> None:
    saved(llama, tmp_path / "base")
    tokenizer = build_tokenizer()
    scores, found = ScoreModel(source=str(tmp_path / "base"), layer=layer, head="mlp"), []
    torch.manual_seed(2)
    scores.load().save_pretrained(tmp_path / "reward", tokenizer)
    torch.manual_seed(2)
    values = ValueModel(source=str(tmp_path / "base"), head="mlp")
    again = ScoreModel(source=str(tmp_path / "reward"), layer=layer, head="mlp")
    for later in (False, True):
        torch.manual_seed(2)
        with reading(later=later):
            found.append([scores.load(), values.load(), again.load()])
    for whole, deferred in zip(*found, strict=True):
        assert is_deferred(deferred)
        read(deferred, "cpu")
        assert_same(deferred, {**dict(whole.named_buffers()), **whole.state_dict()})
        learns = [[w.requires_grad for w in one.parameters()] for one in (whole, deferred)]
        assert learns[0] == learns[1]


@later
def test_the_head_of_a_stock_classifier_is_read_at_once(tmp_path: Path) -> None:
    saved(llama, tmp_path / "base")
    with reading(later=False):
        network = ScoreModel(source=str(tmp_path / "base")).load()
    network.save_pretrained(tmp_path / "reward", build_tokenizer())
    (tmp_path / "reward" / "reward_head.json").unlink()
    deferred = ScoreModel(source=str(tmp_path / "reward")).load()
    assert is_deferred(deferred)
    read(deferred, "cpu")
    assert_same(deferred, {**dict(network.named_buffers()), **network.state_dict()})


@later
def test_a_reward_model_that_is_not_trained_is_loaded_at_once(tmp_path: Path) -> None:
    saved(llama, tmp_path / "base")
    with reading(later=False):
        network = ScoreModel(source=str(tmp_path / "base")).load()
    network.save_pretrained(tmp_path / "reward", build_tokenizer())
    assert not is_deferred(RewardNetwork.from_pretrained(tmp_path / "reward"))


# ------------------------------------------------------------------ what cannot be read so


def as_pickle(folder: Path) -> None:
    file = folder / "model.safetensors"
    torch.save(load_file(file), folder / "pytorch_model.bin")
    file.unlink()


def tied_twice(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, file, metadata={"format": "pt"})


@later
@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (as_pickle, {}, "its weights are not in safetensors files"),
        (tied_twice, {}, "its tied weights are stored twice"),
        (lambda _: None, {"trust_remote_code": True}, "its own code may compute what no file"),
    ],
)
def test_what_cannot_be_read_in_parts_is_loaded_and_named(
    change: Callable[[Path], None],
    options: dict[str, Any],
    said: str,
    model_folder: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with reading(later=False):
        model = CausalLM(source=model_folder).load()
    expected = {**dict(model.named_buffers()), **model.state_dict()}
    model.save_pretrained(tmp_path)
    change(tmp_path)
    with caplog.at_level(logging.INFO, "lrlhf"):
        loaded = CausalLM(source=str(tmp_path), **options).load()
    assert f"{tmp_path} before it is split: {said}" in caplog.text
    assert not is_deferred(loaded)
    assert_same(loaded, expected)


@pytest.mark.parametrize("later", [False, True])
def test_a_file_without_some_weights_is_refused_as_ever(later: bool, tmp_path: Path) -> None:
    saved(llama, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with reading(later=later), pytest.raises(ValueError, match=r"missing \['model.norm.weight'\]"):
        CausalLM(source=str(tmp_path)).load()


def test_a_checkpoint_fills_a_module_that_is_built_whole(model_folder: str, tmp_path: Path) -> None:
    module = RLOO(CausalLM(source=model_folder), Rewards([letters]))
    with torch.no_grad():
        module.policy.get_input_embeddings().weight.fill_(3.0)
    trainer = L.Trainer(logger=False, accelerator="cpu", default_root_dir=tmp_path)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "one.ckpt", weights_only=False)
    with reading(later=True):
        again = RLOO.load_from_checkpoint(tmp_path / "one.ckpt")
    assert bool((again.policy.get_input_embeddings().weight == 3.0).all())


# ------------------------------------------------------------------ who decides


def test_the_strategy_decides(model_folder: str) -> None:
    spec = PretrainedSpec(source=model_folder)
    for start_method, deferred in (("popen", True), ("fork", False)):
        trainer = L.Trainer(
            accelerator="cpu", devices=1, strategy=FSDP2(start_method=start_method), logger=False
        )
        with trainer.init_module():
            assert is_deferred(CausalLM(source=spec.source).load()) == deferred
    assert not is_deferred(CausalLM(source=spec.source).load())


def test_a_trainer_that_reads_no_parts_reads_the_whole(model_folder: str, tmp_path: Path) -> None:
    with reading(later=True):
        module = RLOO(CausalLM(source=model_folder), Rewards([letters]))
    assert module.reference is not None
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path)
    module.trainer = trainer
    module.setup("validate")
    module.on_fit_start()
    expected = CausalLM(source=model_folder).load()
    for model in (module.policy, module.reference.model):
        assert_same(model, {**dict(expected.named_buffers()), **expected.state_dict()})
