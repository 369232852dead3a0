"""Compiled layers compute what they did, and are compiled for what trains only."""

from __future__ import annotations

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
    sequence_logprobs,
)
from lrlhf.models.modes import in_trial, trial
from lrlhf.rollout import Sampling
from tests.models.families import cohere2, gemma2, gpt2, granite, llama
from tests.models.test_packing import BATCH, assert_same_gradients, gradients, qwen2_moe, responses
from tests.rollout.test_transformers_engine import generate

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
        *(
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in (gemma2, gpt2, cohere2, granite)
        ),
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
def test_adapters_and_recomputed_activations_get_the_gradients_of_plain_layers(
    model_folder: str,
) -> None:
    found = []
    for fused in (False, True):
        torch.manual_seed(0)
        spec = CausalLM(
            source=model_folder, lora=LoRA(r=2), gradient_checkpointing=True, compile=fused
        )
        model = spec.load().train()
        # an adapter starts at 0, and its first half then has no gradient
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.1)
        found.append(gradients(model, partial(sequence_logprobs, model, BATCH)))
        assert (graphs() > 0) == fused
    assert_same_gradients(found[1], found[0], atol=1e-4)


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
