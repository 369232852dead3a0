"""Adapters that were trained before are trained further."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import PreTrainedModel

from lrlhf.models import CausalLM, LoRA, frozen_reference, sequence_logprobs
from lrlhf.models.loading.deferred_weights import is_deferred, read, reading
from lrlhf.models.loading.meta import skeleton
from lrlhf.models.teacher import TeacherModel
from tests.models.families import right_padded


@pytest.fixture
def save(language_model: PreTrainedModel, tmp_path: Path) -> Any:
    """Saves adapters of random values, and says where; the model has them."""

    def save(**options: Any) -> tuple[str, peft.PeftModel]:
        config = {"r": 3, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"]} | options
        model = peft.get_peft_model(
            language_model, peft.LoraConfig(**config, task_type="CAUSAL_LM", lora_dropout=0.5)
        )
        with torch.no_grad():
            for weight in model.parameters():
                if weight.requires_grad:
                    weight.copy_(0.3 * torch.randn(weight.shape))
        model.save_pretrained(tmp_path / "adapters")
        return str(tmp_path / "adapters"), model.eval()

    return save


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["norm"]}])
def test_they_go_on_from_where_they_were(save, model_folder: str, options: Any) -> None:
    folder, trained = save(**options)
    batch = right_padded([9, 6])
    expected = sequence_logprobs(trained, batch).detach()
    policy = CausalLM(source=model_folder, lora=LoRA(source=folder)).load()
    torch.testing.assert_close(sequence_logprobs(policy, batch).detach(), expected)
    learning = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert learning == {name for name, weight in trained.named_parameters() if weight.requires_grad}
    assert policy.peft_config["default"].r == 3
    assert policy.peft_config["default"].lora_dropout == 0  # as new ones
    # the reference has them as they were, however they go on
    reference = frozen_reference(policy)
    with torch.no_grad():
        for name in learning:
            policy.get_parameter(name).add_(0.5)
    torch.testing.assert_close(reference.logprobs(batch), expected)
    assert not torch.allclose(sequence_logprobs(policy, batch), expected, atol=0.1)


@pytest.mark.parametrize(
    ("options", "in_parts"), [({}, True), ({"modules_to_save": ["norm"]}, False)]
)
def test_the_model_below_them_may_be_read_later(
    save, model_folder: str, options: Any, in_parts: bool
) -> None:
    folder, trained = save(**options)
    with reading(later=True):
        policy = CausalLM(source=model_folder, lora=LoRA(source=folder)).load()
    assert is_deferred(policy) == in_parts
    read(policy, "cpu")
    batch = right_padded([9, 6])
    torch.testing.assert_close(sequence_logprobs(policy, batch), sequence_logprobs(trained, batch))


def test_a_plan_knows_their_size(save, model_folder: str) -> None:
    folder, trained = save()
    planned = skeleton(CausalLM(source=model_folder, lora=LoRA(source=folder)))
    sizes = [
        sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        for model in (planned, trained)
    ]
    assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize("later", [False, True])
def test_a_model_that_does_not_learn_has_them_too(save, model_folder: str, later: bool) -> None:
    plain = CausalLM(source=model_folder).load()
    folder, trained = save()
    spec = CausalLM(source=model_folder, lora=LoRA(source=folder, dropout=0.5))
    batch = right_padded([9, 6])
    expected = sequence_logprobs(trained, batch).detach()
    assert not torch.allclose(sequence_logprobs(plain, batch), expected, atol=0.1)
    with reading(later=later):
        reference = frozen_reference(plain, spec)
        teacher = TeacherModel(spec.load(trainable=False))
    for frozen in (reference, teacher):
        assert is_deferred(frozen.model) == later
        read(frozen.model, "cpu")
        assert not any(weight.requires_grad for weight in frozen.model.parameters())
        torch.testing.assert_close(frozen.logprobs(batch), expected)
    whole = teacher.best(batch, num_ids=1, vocabulary=10**6).logprobs
    torch.testing.assert_close(whole, expected)


def test_of_new_adapters_a_model_that_does_not_learn_has_none(model_folder: str) -> None:
    model = CausalLM(source=model_folder, lora=LoRA()).load(trainable=False)
    assert not isinstance(model, peft.PeftModel)


def test_a_plan_counts_them_in_what_does_not_learn(save, model_folder: str) -> None:
    folder, trained = save()
    spec = CausalLM(source=model_folder, lora=LoRA(source=folder))
    planned = skeleton(spec, trainable=False)
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in (planned, trained)]
    assert sizes[0] == sizes[1]
    assert not any(weight.requires_grad for weight in planned.parameters())


def test_what_does_not_fit_is_refused(save, model_folder: str) -> None:
    folder, _ = save(target_modules=["q_proj"])
    with pytest.raises(ValueError, match=r"lora\.r: the adapters of lora\.source have that"):
        LoRA(source=folder, r=8)
    with pytest.raises(ValueError, match=r"'nowhere' leads to no adapters.*adapter_config\.json"):
        CausalLM(source=model_folder, lora=LoRA(source="nowhere")).load()
    weights = Path(folder) / "adapter_config.json"
    for before, after, culprit in (
        ('"q_proj"', '"v_proj"', "has weights of another model, such as .*q_proj"),
        ('"q_proj"', '"q_proj", "v_proj"', "has no weights for .*v_proj"),
        ('"r": 3', '"r": 4', "lora does not fit .*size mismatch"),
    ):
        kept = weights.read_text()
        weights.write_text(kept.replace(before, after))
        assert weights.read_text() != kept
        with pytest.raises(ValueError, match=rf"(?s){culprit}"):
            CausalLM(source=model_folder, lora=LoRA(source=folder)).load()
        weights.write_text(kept)
    peft.IA3Config(task_type="CAUSAL_LM").save_pretrained(folder)
    with pytest.raises(ValueError, match="has adapters of the kind IA3"):
        CausalLM(source=model_folder, lora=LoRA(source=folder)).load()
