"""Critics: what a value may know, and where it comes from."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from lrlhf.models import (
    ScoreModel,
    ValueHead,
    ValueModel,
    ValueNetwork,
    check_has_experts,
    sequence_outputs,
    sequence_values,
)
from tests.models.families import bert, gpt2, llama, right_padded, seeded
from tests.models.text_families import tiny_model


def head(size: int = 16, kind: str = "linear") -> ValueHead:
    made = ValueHead(size, kind)
    torch.nn.init.normal_(made.output.weight)
    torch.nn.init.constant_(made.bias, 0.3)
    return made


@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_value_reads_what_stands_before_its_token(build, kind: str) -> None:
    model, batch = seeded(build), right_padded([9, 6])
    made = head(kind=kind)
    values = sequence_values(model, made, batch)
    assert_close(sequence_outputs(model, batch, value_head=made).values, values)
    for row in range(2):
        for column in batch.response_mask[row].nonzero().flatten().tolist():
            before = model.base_model(batch.input_ids[row : row + 1, :column]).last_hidden_state
            assert_close(values[row, column], made(before[:, -1])[0], rtol=1e-4, atol=1e-5)
    assert (values[~batch.response_mask] == 0).all()


def test_a_new_head_starts_at_zero_and_a_frozen_backbone_gets_no_gradient() -> None:
    model, batch = seeded(llama), right_padded([9, 6])
    made = ValueHead(16, "mlp")
    values = sequence_values(model, made, batch, train_backbone=False)
    assert (values == 0).all()
    values.sum().backward()
    assert made.output.weight.grad is not None
    assert all(weight.grad is None for weight in model.parameters())


def test_a_backbone_that_sees_the_future_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a causal model"):
        ValueNetwork(seeded(bert), ValueHead(16, "linear"))


class NoTokenizer:
    pad_token_id = 0

    def save_pretrained(self, folder) -> None:
        pass


def reward_model(folder, **options):
    """A folder with a reward model that has learnt a scale, if it learns one, and the model."""
    seeded(llama).save_pretrained(folder / "base")
    reward = ScoreModel(source=str(folder / "base"), **options).load()
    for made in reward.scorer.heads.values():
        if made.scale is not None:
            torch.nn.init.constant_(made.scale.log_scale, 0.5)
    reward.save_pretrained(folder / "reward", NoTokenizer())
    return str(folder / "reward"), reward.eval()


def test_a_reward_model_gives_its_head_with_its_scale(tmp_path) -> None:
    folder, reward = reward_model(tmp_path, heads=["help", "harm"], head="mlp", learn_scale=True)
    critic = ValueModel(source=folder, head="mlp", reward_head="harm").load()
    batch = right_padded([9, 9])
    # the value before the last token is the reward of the text without it
    shorter = batch.attention_mask.clone()
    shorter[:, 8:] = False
    expected = reward(replace(batch, attention_mask=shorter))[:, 1]
    assert_close(critic.eval()(batch)[:, 8], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"reward_head": None}, "choose one of them"),
        ({"reward_head": "harm"}, "choose one of them"),
        ({"reward_head": "help", "head": "mlp"}, "make them equal"),
        ({"reward_head": "help"}, "pooling: mean, whose head reads an average"),
    ],
)
def test_a_reward_model_that_does_not_fit_says_why(tmp_path, options, culprit: str) -> None:
    folder, _ = reward_model(tmp_path, heads=["help", "tone"], pooling="mean")
    with pytest.raises(ValueError, match=culprit):
        ValueModel(source=folder, **options).load()


def test_values_are_computed_in_the_precision_of_their_head() -> None:
    head = ValueHead(4, "linear")
    head.output.weight.data.fill_(1.0)
    hidden = torch.tensor([256.0, 1.0, 0.0, 0.0]).bfloat16()  # 257 is no bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert head(hidden).item() == 257.0


def test_a_relative_head_reads_directions_and_writes_scores() -> None:
    made = ValueHead(4, "linear", relative=True)
    torch.nn.init.constant_(made.output.weight, 0.25)
    made.measure_in(scale=2.0, shift=7.0)
    # rms of (3, 3, 3, 3) is 3: 0.25 · 4 · 1 = 1; half of the signs cancel out
    states = torch.tensor([[3.0, 3.0, 3.0, 3.0], [-9.0, 9.0, 9.0, -9.0]])
    assert_close(made(states), torch.tensor([9.0, 7.0]))
    assert_close(made(states * 100), made(states))


def test_an_exported_critic_keeps_the_unit_of_its_values(tmp_path) -> None:
    batch = right_padded([9, 6])
    seeded(llama).save_pretrained(tmp_path / "base")
    critic = ValueModel(source=str(tmp_path / "base")).load()
    assert critic.head.is_new
    torch.nn.init.normal_(critic.head.output.weight)
    critic.head.measure_in(scale=3.0, shift=-5.0)
    critic.save_pretrained(tmp_path / "critic")
    again = ValueModel(source=str(tmp_path / "critic")).load()
    assert torch.equal(again.eval()(batch), critic.eval()(batch))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_load_balancing_loss_is_that_of_the_model(family: str) -> None:
    model, batch = tiny_model(family), right_padded([9, 6])
    expected = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask.long(),
        output_router_logits=True,
    ).aux_loss
    out = sequence_outputs(model, batch, router_loss=True)
    assert_close(out.router_loss, expected)
    out.router_loss.backward()
    assert any(
        weight.grad is not None and weight.grad.abs().max() > 0
        for name, weight in model.named_parameters()
        if "gate" in name
    )


def test_a_model_without_experts_has_no_load_to_balance() -> None:
    with pytest.raises(ValueError, match="has no experts"):
        check_has_experts(seeded(llama))
