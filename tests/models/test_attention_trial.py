"""Models whose attention is more than ``sdpa`` computes get all of it.

What is expected comes from ``transformers``' own eager attention.
"""

import logging

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from lrlhf.models import (
    HeadConfig,
    HeadedBackbone,
    allow_packing,
    backbone,
    packs,
    sequence_logprobs,
)
from lrlhf.models.heads import check_output_head
from lrlhf.models.reward_network import check_causal
from lrlhf.rollout.engines.transformers_engine import trial_prompts
from lrlhf.types import SequenceBatch
from tests.models.families import _SIZES, llama, right_padded, seeded


def gemma2(softcap: float | None = 0.5, **options: object) -> PreTrainedModel:
    """Scores far above the bound, so that it matters; a window that every row is longer than."""
    sizes = {**_SIZES, "head_dim": 8, "query_pre_attn_scalar": 1, "sliding_window": 4}
    return Gemma2ForCausalLM(
        Gemma2Config(**{**sizes, **options}, attn_logit_softcapping=softcap)
    ).eval()


def of_transformers(model: PreTrainedModel, batch: SequenceBatch, attention: str) -> Tensor:
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits
    model.set_attn_implementation(before)
    found = logits[:, :-1].log_softmax(-1).gather(2, batch.input_ids[:, 1:, None])[..., 0]
    counts = batch.response_mask[:, 1:]
    return torch.cat([torch.zeros(len(found), 1), found.masked_fill(~counts, 0.0)], dim=1)


def test_bounded_scores_stay_bounded_in_packed_rows() -> None:
    model, batch = seeded(gemma2), right_padded([9, 6])
    expected = of_transformers(model, batch, "eager")
    assert not torch.allclose(of_transformers(model, batch, "sdpa"), expected, atol=0.1)
    assert allow_packing(model)
    assert packs(model)
    assert_close(sequence_logprobs(model, batch).detach(), expected)


def test_bounded_scores_stay_bounded_where_rows_are_padded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = seeded(gemma2), right_padded([9, 6])
    expected = of_transformers(model, batch, "eager")
    monkeypatch.setattr(backbone, "_obstacle", lambda _: "this is a test")
    assert not allow_packing(model)
    assert_close(sequence_logprobs(model, batch).detach(), expected)


def test_a_bound_is_noticed_whatever_weights_and_precision_hide() -> None:
    # scores of new weights are so small that the bound changes no hidden state in 16 bits
    model = gemma2(50.0, initializer_range=0.002).to(torch.bfloat16)
    assert allow_packing(model)
    assert model.config._attn_implementation == "lrlhf_packed_own"
    unbounded = gemma2(None)
    assert allow_packing(unbounded)
    assert unbounded.config._attn_implementation == "lrlhf_packed"
    with torch.device("meta"):
        skeleton = gemma2(50.0)
    assert allow_packing(skeleton)
    assert skeleton.config._attn_implementation == "lrlhf_packed_own"


def test_what_packed_rows_do_not_know_of_a_layer_keeps_them_padded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # rows of the trial are shorter than an index that keeps 2,048 keys: their states would agree
    model = seeded(llama)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, inputs, options: (inputs, {**options, "indices": torch.zeros(1)}),
            with_kwargs=True,
        )
    with caplog.at_level(logging.WARNING, "lrlhf"):
        assert not allow_packing(model)
    assert "its attention is given 'indices'" in caplog.text
    assert model.config._attn_implementation == "sdpa"


def test_trials_put_their_tokens_where_the_model_computes_not_where_its_weights_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # with weights in main memory ``device`` says "cpu" and the model computes on a GPU: here it
    # computes on the CPU, and ``device`` names what does not exist
    monkeypatch.setattr(PreTrainedModel, "device", torch.device("cuda:7"))
    model = seeded(llama)
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device=model.device)
    assert allow_packing(model)
    check_output_head(model)
    check_causal(model, "it would know the future")
    assert trial_prompts(model).input_ids.device.type == "cpu"
    monkeypatch.setattr(torch.nn.ModuleDict, "to", lambda heads, _: heads)  # heads are new weights
    body = seeded(llama).base_model
    body.extra = torch.nn.Linear(2, 2)  # of no block: whether it is used is tried
    HeadedBackbone(body, HeadConfig(names=("a",), layer=2))
    assert not body.extra.weight.requires_grad
