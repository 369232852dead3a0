"""Packed rows through FlexAttention: the same numbers as rows by themselves.

What is expected comes from padded rows and the attention in the models' own files. On CPUs torch
has no compiled backward pass of FlexAttention; here its own uncompiled one stands in.
"""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import create_mask
from torch.testing import assert_close
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations import flex_attention as of_transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

from lrlhf.models import allow_packing, packs, sequence_logprobs
from lrlhf.models.backbone import _uses_depth_first_order, keep_attention
from lrlhf.models.packed import packed_attention as flex
from lrlhf.models.packed import packing
from lrlhf.models.packed.packed_attention import _full_mask
from lrlhf.models.packed.packing import compact, find_trees, pack
from lrlhf.types import SequenceBatch
from tests.matrices import few_of
from tests.models.families import gemma2, gpt2, llama, seeded
from tests.models.test_forks import BATCH as FORKS
from tests.models.test_forks import TURNS, of_turns
from tests.models.test_packing import (
    BATCH,
    PACKED_FAMILIES,
    assert_same_gradients,
    gradients,
    mistral,
    qwen2,
    responses,
)
from tests.vlms import batch_of, build_vlm, row


class Calls:
    """How often FlexAttention was called."""

    number = 0


@pytest.fixture
def with_gradients(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Uncompiled, torch differentiates FlexAttention on CPUs as well, but refuses to be asked."""
    calls = Calls()

    def uncompiled(*inputs: Any, **options: Any) -> Tensor:
        calls.number += 1
        del options["training"]
        result: Tensor = torch_flex.flex_attention(*inputs, **options)
        return result

    monkeypatch.setattr(of_transformers, "compile_friendly_flex_attention", uncompiled)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    refuses = flex._obstacle

    def on_cuda(*inputs: Any) -> str | None:
        reason = refuses(*inputs)
        return None if reason == "gradients on CPUs" else reason

    monkeypatch.setattr(flex, "_obstacle", on_cuda)
    return calls


def flexible(model: PreTrainedModel) -> None:
    model.config._attn_implementation = "flex_attention"
    assert allow_packing(model)


def ordered(batch: SequenceBatch) -> packing.DepthFirstOrder:
    rows = compact(batch.input_ids, batch.attention_mask, batch.forks)
    found = pack(rows, find_trees(rows, batch.group_ids), depth_first=True).segments.depth_first
    assert found is not None
    return found


# ------------------------------------------------------------------ the walk


def test_a_token_is_entered_before_all_that_follow_it_and_left_behind_them() -> None:
    # a prompt a b, answers c d and e; then f g h, where h follows f
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 0], [6, 7, 8, 0]])
    batch = SequenceBatch(
        input_ids=ids,
        attention_mask=ids != 0,
        response_mask=ids != 0,
        group_ids=torch.tensor([0, 0, 1]),
        forks=torch.tensor([[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]]),
    )
    rows = compact(batch.input_ids, batch.attention_mask, batch.forks)
    packed = pack(rows, find_trees(rows, batch.group_ids), depth_first=True)
    found = packed.segments.depth_first
    assert found is not None
    order = dict(zip(ids.flatten()[packed.source].tolist(), range(8), strict=True))
    entered = {token: int(found.enter[place]) for token, place in order.items()}
    left = {token: int(found.leave[place]) for token, place in order.items()}
    depths = {token: int(found.depth[place]) for token, place in order.items()}
    assert depths == {1: 0, 2: 1, 3: 2, 4: 3, 5: 2, 6: 0, 7: 1, 8: 1}
    # as many as follow a token, itself included
    sizes = {1: 5, 2: 4, 3: 2, 4: 1, 5: 1, 6: 3, 7: 1, 8: 1}
    assert {token: left[token] - entered[token] for token in order} == sizes
    seen = {(q, k) for q in order for k in order if entered[k] <= entered[q] < left[k]}
    chains = {1: "1", 2: "12", 3: "123", 4: "1234", 5: "125", 6: "6", 7: "67", 8: "68"}
    assert seen == {(q, int(k)) for q, chain in chains.items() for k in chain}


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("tokens", ["forks", "groups", "many"])
def test_no_block_that_is_seen_is_left_out_and_no_other_is_taken_as_a_whole(
    tokens: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "BLOCK", 4)
    batch = {"forks": FORKS, "groups": BATCH, "many": responses([9, 30], [[8] * 5, [40, 3]])}
    found = ordered(batch[tokens])
    mask, count = found.mask(window), len(found.enter)
    length = -(-count // 4) * 4
    table = torch.zeros(length, length, dtype=torch.bool)
    table[:count, :count] = create_mask(mask.mask_mod, 1, 1, count, count, "cpu")[0, 0]
    per_block = table.view(length // 4, 4, -1, 4).sum(dim=(1, 3))
    some, every = (
        torch_flex._ordered_to_dense(number, columns, length // 4)[0, 0].bool()
        for number, columns in (
            (mask.kv_num_blocks, mask.kv_indices),
            (mask.full_kv_num_blocks, mask.full_kv_indices),
        )
    )
    assert torch.equal(every, per_block == 16)
    assert not (some & every).any()
    assert not ((per_block > 0) & ~(some | every)).any()
    # bounds of positions say more of a walk than of how far each token in it is from its root
    vain = 1.0 if window is None else 1.6
    assert int((some | every).sum()) <= vain * int((per_block > 0).sum())
    assert found.mask(window) is mask


# ------------------------------------------------------------------ the numbers


@pytest.mark.parametrize("build", few_of(PACKED_FAMILIES, (llama, gpt2, gemma2, mistral, qwen2)))
def test_log_probabilities_and_gradients_are_those_of_separate_rows(
    build: Callable[[], PreTrainedModel], with_gradients: Calls
) -> None:
    model = seeded(build)
    model.set_attn_implementation("eager")
    alone = gradients(model, lambda: sequence_logprobs(model, BATCH))
    turns = gradients(model, lambda: of_turns(TURNS, sequence_logprobs(model, TURNS)))
    flexible(model)
    assert with_gradients.number == 0
    actual = gradients(model, lambda: sequence_logprobs(model, BATCH))
    assert with_gradients.number == model.config.num_hidden_layers
    assert_same_gradients(actual, alone, atol=5e-5)
    actual = gradients(model, lambda: of_turns(FORKS, sequence_logprobs(model, FORKS)))
    assert_same_gradients(actual, turns, atol=5e-5)


def test_bounded_scores_stay_bounded(with_gradients: Calls) -> None:
    model = seeded(gemma2)
    model.config.attn_logit_softcapping = 0.01
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 0.01
    model.set_attn_implementation("eager")
    expected = gradients(model, lambda: sequence_logprobs(model, BATCH))
    flexible(model)
    actual = gradients(model, lambda: sequence_logprobs(model, BATCH))
    assert with_gradients.number == model.config.num_hidden_layers
    assert_same_gradients(actual, expected, atol=5e-5)


def test_rows_with_images(with_gradients: Calls) -> None:
    vlm = build_vlm("qwen2_vl")
    texts = [row(vlm, [0, 1], answer=answer) for answer in ("one!", "a second one")]
    batch = batch_of(texts)
    expected = gradients(vlm.model, lambda: sequence_logprobs(vlm.model, batch))
    vlm.model.model.language_model.config._attn_implementation = "flex_attention"
    assert allow_packing(vlm.model)
    actual = gradients(vlm.model, lambda: sequence_logprobs(vlm.model, batch))
    assert with_gradients.number > 0
    assert_same_gradients(actual, expected, atol=5e-5)


def test_recomputed_activations_see_the_same(with_gradients: Calls) -> None:
    model = seeded(llama)
    expected = gradients(model, lambda: sequence_logprobs(model, BATCH))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    flexible(model)
    actual = gradients(model, lambda: sequence_logprobs(model, BATCH))
    assert with_gradients.number == 2 * model.config.num_hidden_layers
    assert_same_gradients(actual, expected, atol=2e-5)


@pytest.mark.usefixtures("with_gradients")
def test_autocast_decides_the_precision_as_for_sdpa() -> None:
    layer = torch.nn.Module()
    found = ordered(BATCH)
    heads = [torch.randn(1, 2, len(found.enter), 8) for _ in range(3)]
    heads[2] = heads[2].bfloat16()  # norms leave queries and keys in float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = flex.flex_attention(layer, tuple(heads), found.mask(None), dropout=0, scaling=0.3)
    assert result is not None
    assert result.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch, about its own compiler
@torch.no_grad()
def test_compiled_kernels_compute_the_same() -> None:
    model = seeded(mistral)
    alone, turns = sequence_logprobs(model, BATCH), sequence_logprobs(model, TURNS)
    flexible(model)
    assert_close(sequence_logprobs(model, BATCH), alone, rtol=0, atol=2e-5)
    actual = of_turns(FORKS, sequence_logprobs(model, FORKS))
    assert_close(actual, of_turns(TURNS, turns), rtol=0, atol=2e-5)


# ------------------------------------------------------------------ which attention


def test_what_flex_attention_does_not_compute_goes_through_sdpa_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "_reported", set())
    model = seeded(llama)
    model.set_attn_implementation("eager")
    expected = gradients(model, lambda: sequence_logprobs(model, BATCH))
    flexible(model)
    with caplog.at_level(logging.INFO, "lrlhf"):
        actual = gradients(model, lambda: sequence_logprobs(model, BATCH))
    assert_same_gradients(actual, expected, atol=2e-5)
    assert caplog.text.count("FlexAttention does not compute gradients on CPUs") == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dropout": 0.5}, "dropout"),
        ({"dtype": torch.float64}, "products of torch.float64"),
        ({"device": "meta", "size": 8}, "heads of 8 numbers"),
        ({"device": "meta", "size": 512}, "heads of 512 numbers"),
        ({"device": "meta"}, None),
        ({"s_aux": torch.zeros(2)}, "attention sinks on CPUs"),
        ({}, None),
    ],
)
def test_each_obstacle_has_a_name(
    changed: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "tried", lambda *_: None)
    # the meta device stands in for CUDA, whose kernels know fewer sizes
    size, dtype = changed.get("size", 32), changed.get("dtype", torch.float32)
    head = torch.zeros(1, 2, 4, size, dtype=dtype, device=changed.get("device", "cpu"))
    options = {name: changed[name] for name in ("s_aux",) if name in changed}
    found = flex._obstacle(head, head, head, changed.get("dropout", 0.0), options)
    assert found is said is None or str(found).startswith(str(said))


@pytest.mark.parametrize(
    ("asked", "device", "depth_first"),
    [
        (None, "cpu", False),
        (None, "cuda", True),
        ("sdpa", "cuda", False),
        ("flex_attention", "cpu", True),
        ("flex_attention", "cuda", True),
    ],
)
def test_the_option_decides_which_attention_packed_rows_go_through(
    asked: str | None, device: str, depth_first: bool
) -> None:
    model = seeded(llama)
    if asked is not None:
        model.set_attn_implementation(asked)
    keep_attention(model, asked)
    assert allow_packing(model)
    assert packs(model)
    assert _uses_depth_first_order(model, torch.device(device)) is depth_first


def test_models_with_flash_attention_pack_through_flex_and_generate_through_flash() -> None:
    kernel, asked = "flash_attention_9", []

    def flash(layer: Any, *heads: Any, **options: Any) -> tuple[Tensor, None]:
        asked.append(layer.config._attn_implementation)
        return sdpa_attention_forward(layer, *heads, **options)

    AttentionInterface.register(kernel, flash)
    AttentionMaskInterface.register(kernel, flash_attention_mask)
    model = seeded(llama)
    with torch.no_grad():
        expected = sequence_logprobs(model, BATCH)
        padded = model(BATCH.input_ids, attention_mask=BATCH.attention_mask).logits
    model.config._attn_implementation = kernel
    keep_attention(model, kernel)
    with torch.no_grad():  # on CPUs sdpa stands in, before and after
        found = model(BATCH.input_ids, attention_mask=BATCH.attention_mask).logits
    assert_close(found[BATCH.attention_mask], padded[BATCH.attention_mask])
    assert allow_packing(model)
    assert model.config._attn_implementation == "lrlhf_packed_flash_attention_9"
    assert_close(sequence_logprobs(model, BATCH).detach(), expected, rtol=0, atol=2e-5)
    assert asked == []

    # on a GPU the kernel is called under its own name
    attend = AttentionInterface()["lrlhf_packed_flash_attention_9"]
    layer = SimpleNamespace(config=model.config, is_causal=True, layer_idx=0, modules=model.modules)
    head = torch.zeros(1, 2, 3, 16, device="meta")
    attend(layer, head, head, head, None)
    assert asked == [kernel]
    assert model.config._attn_implementation == "lrlhf_packed_flash_attention_9"


@torch.no_grad()
def test_flash_attention_sees_a_window_on_cpus_too() -> None:
    attended = torch.tensor([[1, 1, 1, 0]])
    mask = _full_mask(attended, 2, 4, 2)[0, 0]
    assert mask.tolist() == [[False, True, True, False], [False, False, True, False]]
    assert _full_mask(None, 2, 2, None)[0, 0].tolist() == [[True, False], [True, True]]


@pytest.mark.usefixtures("with_gradients")
@pytest.mark.parametrize("fault", ["compiler", "numbers", None])
def test_where_the_kernel_does_not_work_sdpa_computes(
    fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = of_transformers.compile_friendly_flex_attention

    def broken(*inputs: Any, **options: Any) -> Tensor:
        if fault == "compiler":
            raise RuntimeError("no C compiler was found\nand more")
        return 2 * whole(*inputs, **options)

    if fault:
        monkeypatch.setattr(of_transformers, "compile_friendly_flex_attention", broken)
    flex.tried.cache_clear()
    found = flex.tried(((4, 16), (2, 16), (2, 16)), torch.float32, torch.device("cpu"))
    flex.tried.cache_clear()
    assert (
        found
        == {
            "compiler": "anything here (RuntimeError: no C compiler was found)",
            "numbers": "attention here as sdpa does",
            None: None,
        }[fault]
    )
