from collections.abc import Callable

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaForCausalLM, PreTrainedModel

from lrlhf.models import check_output_head, sequence_logprobs, sequence_outputs
from lrlhf.types import SequenceBatch
from tests.models.families import (
    CAUSAL_FAMILIES,
    gemma2,
    gpt2,
    left_padded,
    llama,
    right_padded,
    seeded,
)


def naive_logprobs(
    model: PreTrainedModel, batch: SequenceBatch, temperature: float = 1.0
) -> torch.Tensor:
    """Token by token, each row alone and unpadded, from the model's own whole logits."""
    result = torch.zeros(batch.input_ids.shape)
    for row in range(len(batch)):
        columns = batch.attention_mask[row].nonzero().flatten()
        ids = batch.input_ids[row, columns]
        logits = model(input_ids=ids[None]).logits[0].float() / temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        for position in range(1, len(ids)):
            if batch.response_mask[row, columns[position]]:
                result[row, columns[position]] = logprobs[position - 1, ids[position]]
    return result


@pytest.mark.parametrize("build", CAUSAL_FAMILIES)
def test_equals_the_log_softmax_of_each_family_s_own_logits(
    build: Callable[[], PreTrainedModel],
) -> None:
    model, batch = seeded(build), right_padded([9, 6, 3])
    actual = sequence_logprobs(model, batch, temperature=0.7, chunk_size=4)
    assert_close(actual, naive_logprobs(model, batch, 0.7), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("build", [llama, gpt2])
def test_left_padding_gives_the_same_values(build: Callable[[], PreTrainedModel]) -> None:
    model, batch = seeded(build), right_padded([9, 6, 3])
    moved = left_padded(batch, extra=2)
    expected = sequence_logprobs(model, batch)[batch.response_mask]
    assert_close(sequence_logprobs(model, moved)[moved.response_mask], expected)


def test_it_is_zero_outside_the_response_and_on_the_first_token() -> None:
    batch = right_padded([9, 6], prompt=0)
    actual = sequence_logprobs(seeded(llama), batch)
    assert actual[:, 0].tolist() == [0.0, 0.0]
    assert actual[1, 6:].tolist() == [0.0, 0.0, 0.0]
    assert (actual[0, 1:] < 0).all()


def test_gradients_equal_those_of_whole_logits() -> None:
    model, batch = seeded(gemma2), right_padded([9, 6, 3])
    weights = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(0))
    (naive_logprobs(model, batch) * weights).sum().backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    (sequence_logprobs(model, batch, chunk_size=3) * weights).sum().backward()
    for name, weight in model.named_parameters():
        assert_close(weight.grad, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_entropy_is_that_of_the_predicting_distributions() -> None:
    model, batch = seeded(llama), right_padded([9, 6])
    result = sequence_outputs(model, batch, entropy=True)
    assert result.entropy is not None
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits
    entropy = torch.distributions.Categorical(logits=logits[:, :-1]).entropy()
    expected = torch.nn.functional.pad(entropy, (1, 0)) * batch.response_mask
    assert_close(result.entropy, expected, rtol=1e-5, atol=1e-5)


def test_a_batch_without_response_gives_zeros_and_reaches_every_parameter() -> None:
    model, batch = seeded(llama), right_padded([9, 6], prompt=9)
    result = sequence_logprobs(model, batch)
    assert not result.any()
    result.sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in model.parameters())


class OddLlama(LlamaForCausalLM):
    """Doubles its logits, which no config field says."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output


def test_a_family_that_changes_its_logits_in_an_unknown_way_is_refused() -> None:
    model = OddLlama(seeded(llama).config)
    with pytest.raises(ValueError, match="OddLlama computes its logits"):
        check_output_head(model)
