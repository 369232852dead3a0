"""Compiled layers compute what they did, and are compiled for what trains only."""

from __future__ import annotations

import copy
import sysconfig
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.testing import assert_close
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.models import (
    CausalLM,
    LoRA,
    ScoreModel,
    ValueModel,
    allow_packing,
    compile_layers,
    frozen_reference,
    plain_model,
    sequence_logprobs,
)
from lrlhf.models.modes import in_trial, trial
from lrlhf.rollout import Sampling
from tests.matrices import few_of
from tests.models.families import cohere2, gemma2, gpt2, granite, llama
from tests.models.test_packing import BATCH, assert_same_gradients, gradients, qwen2_moe, responses
from tests.rollout.test_transformers_engine import generate
from tests.vlms import batch_of, build_vlm, rows_of

# a compiler and what it imports may warn as they like
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def graphs() -> int:
    """How many pieces of code were compiled in this test."""
    return int(counters["stats"]["unique_graphs"])


def assert_same(model: PreTrainedModel, compute: Callable[[], Tensor]) -> None:
    """Compare what `compute` gives before and after the layers are compiled, with gradients."""
    expected = gradients(model, compute)
    assert graphs() == 0
    compile_layers(model)
    fused = gradients(model, compute)
    assert graphs() > 0
    assert_same_gradients(fused, expected, atol=2e-5)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(llama, marks=pytest.mark.slow),
        pytest.param(gemma2, marks=pytest.mark.slow),
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (gpt2, cohere2, granite)),
    ],
)
def test_packed_rows_of_any_length_get_the_numbers_of_plain_layers(
    build: Callable[[], PreTrainedModel],
) -> None:
    torch.manual_seed(0)
    model = build().eval()
    names = list(model.state_dict())
    assert allow_packing(model)
    assert_same(model, lambda: sequence_logprobs(model, BATCH))
    assert list(model.state_dict()) == names

    # other rows: nothing is compiled again
    before, other = graphs(), responses([9, 3, 2], [[5, 4], [3, 3], [9, 8]])
    fused = sequence_logprobs(model, other)
    assert graphs() == before
    with trial():
        assert_close(fused, sequence_logprobs(model, other), rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", few_of(["qwen3_vl", "gemma3"], ["qwen3_vl"]))
def test_rows_with_images_get_the_numbers_of_plain_layers(family: str) -> None:
    vlm = build_vlm(family)
    batch = batch_of(rows_of(vlm))
    assert allow_packing(vlm.model)
    assert_same(vlm.model, lambda: sequence_logprobs(vlm.model, batch))


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "checkpointing"), [(None, True), (LoRA(r=2), True)])
def test_adapters_and_recomputed_activations_get_the_gradients_of_plain_layers(
    model_folder: str, lora: LoRA | None, checkpointing: bool
) -> None:
    found = []
    for fused in (False, True):
        torch.manual_seed(0)
        spec = CausalLM(
            source=model_folder, lora=lora, gradient_checkpointing=checkpointing, compile=fused
        )
        model = spec.load().train()
        if lora is not None:  # an adapter starts at 0, and its first half then has no gradient
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(weight, std=0.1)
        assert graphs() == 0
        found.append(gradients(model, partial(sequence_logprobs, model, BATCH)))
        assert (graphs() > 0) == fused
    (plain, plain_gradients), (other, other_gradients) = found
    assert_close(other, plain, rtol=0, atol=2e-5)
    assert other_gradients.keys() == plain_gradients.keys()
    for name, gradient in plain_gradients.items():
        scale = float(gradient.abs().max())
        assert_close(other_gradients[name], gradient, rtol=0, atol=1e-4 * scale, msg=name)


def test_loading_and_drawing_compile_nothing(
    model_folder: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    drawn = []
    for fused in (False, True):
        policy = CausalLM(source=model_folder, compile=fused).load()
        ScoreModel(source=model_folder, compile=fused).load()
        ValueModel(source=model_folder, compile=fused).load()
        drawn.append(generate(policy, tokenizer, Sampling(max_new_tokens=5), num_generations=2))
    assert graphs() == 0
    assert torch.equal(drawn[0].input_ids, drawn[1].input_ids)


def test_a_reference_keeps_its_own_weights(model_folder: str) -> None:
    policy = CausalLM(source=model_folder, compile=True).load()
    with trial():
        before = sequence_logprobs(policy, BATCH).detach()
        reference, twin = frozen_reference(policy), copy.deepcopy(policy)
        with torch.no_grad():
            for weight in policy.parameters():
                weight.mul_(0.5)
        assert torch.equal(reference.logprobs(BATCH), before)
        assert torch.equal(sequence_logprobs(twin, BATCH), before)
        assert not torch.equal(sequence_logprobs(policy, BATCH), before)


def test_a_machine_that_cannot_compile_is_told_what_is_missing(
    model_folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = CausalLM(source=model_folder, compile=True)
    monkeypatch.setenv("CXX", "strange-compiler")
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler \(strange-compiler\), not found"):
        spec.load()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"\(g\+\+\).*apt install g\+\+.*compile: false"):
        spec.load()
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    with pytest.raises(ValueError, match=r"and Python's headers .*python3-dev"):
        spec.load()


def test_a_trial_in_one_thread_leaves_the_others_alone() -> None:
    """Whichever ends first."""
    inside, ended = threading.Event(), threading.Event()

    def other() -> None:
        with trial():
            inside.set()
            ended.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    assert not in_trial()
    with trial():
        with trial():
            assert in_trial()
        ended.set()
        thread.join()
        assert in_trial()
    assert not in_trial()


def test_a_model_with_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="Qwen2MoeForCausalLM has experts"):
        compile_layers(qwen2_moe())


def test_a_model_whose_blocks_are_not_found_is_refused(model_folder: str) -> None:
    model = plain_model(CausalLM(source=model_folder).load())
    model.base_model.layers = nn.ModuleList()
    with pytest.raises(ValueError, match="the blocks of LlamaForCausalLM were not found"):
        compile_layers(model)
