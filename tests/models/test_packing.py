"""Rows in one packed row, shared beginnings once: the same numbers as rows by themselves.

What is expected comes from padded rows and the attention that ``transformers`` itself has.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import peft
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from lrlhf.models import (
    HeadConfig,
    HeadedBackbone,
    RewardNetwork,
    allow_packing,
    hidden_states,
    packs,
    placeholder_ids,
    sequence_logprobs,
)
from lrlhf.models.backbone import HiddenStates
from lrlhf.models.packed import packed_attention as attention
from lrlhf.models.packed.packing import Tree, compact, find_trees, pack
from lrlhf.types import SequenceBatch
from tests.matrices import few_of
from tests.models.families import (
    _SIZES,
    VOCABULARY,
    bert,
    cohere,
    cohere2,
    gemma2,
    gpt2,
    granite,
    left_padded,
    llama,
    seeded,
)
from tests.vlms import FAMILY_PARAMS, batch_of, build_vlm, row


def mistral() -> PreTrainedModel:
    # every row is longer than the window
    return MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=5))


def qwen2() -> PreTrainedModel:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return Qwen2ForCausalLM(
        Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=4, layer_types=kinds)
    )


PACKED_FAMILIES = [llama, gpt2, gemma2, cohere, cohere2, granite, mistral, qwen2]


def responses(prompts: list[int], answers: list[list[int]]) -> SequenceBatch:
    """Random prompts of the given lengths, each with answers of the given lengths."""
    generator = torch.Generator().manual_seed(5)

    def draw(length: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()

    rows, groups, begin = [], [], []
    for group, (length, own) in enumerate(zip(prompts, answers, strict=True)):
        prompt = draw(length)
        rows += [torch.tensor([*prompt, *draw(answer)]) for answer in own]
        groups += [group] * len(own)
        begin += [length] * len(own)
    ids = pad(pad_sequence(rows, batch_first=True), (0, 2))
    mask = ids != 0
    batch = SequenceBatch(
        input_ids=ids,
        attention_mask=mask,
        response_mask=mask & (torch.arange(ids.shape[1]) >= torch.tensor(begin)[:, None]),
        group_ids=torch.tensor(groups),
    )
    return batch.select(torch.randperm(len(rows), generator=generator))


BATCH = responses([11, 4, 1], [[6, 6, 5, 1], [9, 3], [7]])


def gradients(
    model: PreTrainedModel, compute: Callable[[], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The result, and the gradients of a sum in which every entry weighs differently."""
    model.zero_grad()
    result = compute()
    weights = torch.linspace(-1, 1, result.numel()).view_as(result)
    (result * weights).sum().backward()
    found = {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    return result.detach(), found


def assert_equal_paths(
    model: PreTrainedModel, compute: Callable[[], Tensor], *, atol: float = 2e-5
) -> None:
    assert not packs(model)
    model.set_attn_implementation("eager")  # as the family's authors wrote it
    expected = gradients(model, compute)
    model.set_attn_implementation("sdpa")
    assert allow_packing(model)
    assert_same_gradients(gradients(model, compute), expected, atol=atol)


def assert_same_gradients(
    actual: tuple[Tensor, dict[str, Tensor]],
    expected: tuple[Tensor, dict[str, Tensor]],
    *,
    atol: float,
) -> None:
    """Compare what `gradients` returned, each gradient on its own scale."""
    assert_close(actual[0], expected[0], rtol=0, atol=atol)
    assert actual[1].keys() == expected[1].keys()
    # what is zero but for rounding, as the gradient of a key's bias, has no scale of its own
    least = 1e-3 * max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        scale = max(float(gradient.abs().max()), least)
        assert_close(actual[1][name], gradient, rtol=0, atol=atol * scale, msg=name)


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_BLOCK", 4)  # of branches several, without long rows


# ------------------------------------------------------------------ the layout


def test_trees_hold_what_rows_begin_with_and_what_follows() -> None:
    ids = torch.tensor(
        [[7, 8, 9, 1, 2, 0], [7, 8, 9, 3, 0, 0], [7, 8, 5, 0, 0, 0], [7, 8, 9, 4, 4, 4]]
    )
    mask = ids != 0
    rows = compact(ids, mask)
    assert find_trees(rows, torch.tensor([4, 4, 2, 4])) == [
        Tree(rows=(3, 0, 1), prefix=3, branches=(3, 2, 1)),
        Tree(rows=(2,), prefix=3, branches=()),
    ]
    together = find_trees(rows, torch.zeros(4))
    assert together == [Tree(rows=(3, 0, 1, 2), prefix=2, branches=(4, 3, 2, 1))]
    assert together[0].tokens == 2 + 4 + 3 + 2 + 1
    unlike = compact(torch.tensor([[1, 2], [2, 2]]), torch.ones(2, 2).bool())
    assert {tree.rows for tree in find_trees(unlike, torch.zeros(2))} == {(0,), (1,)}
    alone = find_trees(rows, None)
    assert [tree.rows for tree in alone] == [(3,), (0,), (1,), (2,)]
    assert [tree.tokens for tree in alone] == [6, 5, 4, 3]


def test_a_packed_row_has_every_token_once_and_the_index_finds_it() -> None:
    rows = compact(BATCH.input_ids, BATCH.attention_mask)
    trees = find_trees(rows, BATCH.group_ids)
    packed = pack(rows, trees)
    # 11 + 18, 4 + 12 and 1 + 7 tokens: prompts once
    assert len(packed.source) == (11 + 18) + (4 + 12) + (1 + 7)
    flat = rows.input_ids.flatten()[packed.source]
    assert torch.equal(flat[packed.index][rows.attention_mask], rows.input_ids[rows.attention_mask])


# ------------------------------------------------------------------ the numbers


@pytest.mark.parametrize("build", few_of(PACKED_FAMILIES, (llama, gpt2, gemma2, qwen2)))
def test_log_probabilities_and_gradients_are_those_of_padded_rows(
    build: Callable[[], PreTrainedModel],
) -> None:
    model = seeded(build)
    assert_equal_paths(model, lambda: sequence_logprobs(model, BATCH))


@torch.no_grad()
def test_neither_the_order_nor_the_cut_nor_the_padding_of_rows_matters() -> None:
    model = seeded(llama)
    assert allow_packing(model)
    whole = sequence_logprobs(model, BATCH)
    order = torch.tensor([6, 2, 0, 5, 1, 4, 3])
    assert_close(sequence_logprobs(model, BATCH.select(order)), whole[order])
    for rows in torch.arange(7).split(3):
        assert_close(sequence_logprobs(model, BATCH.select(rows)), whole[rows])
    moved = left_padded(replace(BATCH, group_ids=None), extra=3)
    moved = replace(moved, group_ids=BATCH.group_ids)
    found = sequence_logprobs(model, moved)[moved.response_mask]
    assert_close(found, whole[BATCH.response_mask])


def test_adapters_and_recomputed_activations_are_part_of_it() -> None:
    base = seeded(llama)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "down_proj"]))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    base.gradient_checkpointing_enable({"use_reentrant": False})
    base.enable_input_require_grads()
    base.train()
    assert_equal_paths(base, lambda: sequence_logprobs(model, BATCH))


@pytest.mark.parametrize(("pooling", "layer"), [("last", 2), ("mean", -1), ("attention", 2)])
def test_scores_of_pairs_are_those_of_padded_rows(pooling: str, layer: int) -> None:
    model = seeded(llama).base_model
    backbone = HeadedBackbone(model, HeadConfig(names=("a", "b"), pooling=pooling, layer=layer))
    network = RewardNetwork(backbone)
    assert packs(model)
    model.config._attn_implementation = "sdpa"
    assert_equal_paths(model, lambda: network(BATCH))


@pytest.mark.parametrize("family", FAMILY_PARAMS)
def test_responses_about_the_same_images_share_them(family: str) -> None:
    vlm = build_vlm(family)
    texts = [row(vlm, [1, 2], answer=answer) for answer in ("one!", "two", "a third answer")]
    shown = texts[0].media
    texts = [replace(text, media=shown) for text in texts]
    texts += [row(vlm, [3], answer="no"), row(vlm, question="nothing?", answer="none")]
    batch = replace(batch_of(texts), group_ids=torch.tensor([0, 0, 0, 1, 2]))
    if family == "gemma3":  # its images are seen both ways
        assert allow_packing(vlm.model)
        marks = list(placeholder_ids(vlm.model.config).values())
        states = hidden_states(vlm.model, batch)
        assert states.computed.shape == batch.input_ids.shape
        assert torch.isin(batch.input_ids, torch.tensor(marks)).any()
        return
    assert_equal_paths(vlm.model, lambda: sequence_logprobs(vlm.model, batch), atol=5e-5)
    states = hidden_states(vlm.model, batch)
    saved = 2 * int((batch.attention_mask & ~batch.response_mask)[0].sum())
    assert states.computed.numel() <= int(batch.lengths.sum()) - saved


def test_rows_that_show_different_images_share_nothing() -> None:
    vlm = build_vlm("qwen2_vl")
    texts = [row(vlm, [0], answer="one!"), row(vlm, [4], answer="one!")]
    assert texts[0].input_ids == texts[1].input_ids
    batch = replace(batch_of(texts), group_ids=torch.zeros(2, dtype=torch.long))
    assert_equal_paths(vlm.model, lambda: sequence_logprobs(vlm.model, batch), atol=5e-5)
    assert hidden_states(vlm.model, batch).computed.numel() == int(batch.lengths.sum())


def test_experts_are_balanced_over_whole_rows() -> None:
    model = seeded(llama)
    assert allow_packing(model)
    shared: HiddenStates = hidden_states(model, BATCH)
    whole = hidden_states(model, BATCH, share=False)
    assert shared.computed.numel() < whole.computed.numel() == int(BATCH.lengths.sum())


# ------------------------------------------------------------------ which models


def mamba() -> PreTrainedModel:
    return FalconMambaForCausalLM(
        FalconMambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4)
    )


def qwen2_moe(**options: object) -> PreTrainedModel:
    # it sees a window through its mask alone, and does not tell the attention of it
    kinds = ["sliding_attention"] * 3
    window = {"use_sliding_window": True, "sliding_window": 16, "layer_types": kinds}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**_SIZES, **{**window, **options}))


def bert_as_made() -> PreTrainedModel:
    model = bert()
    for weight in model.parameters():  # so small that what tokens see hardly matters
        weight.data.mul_(0.05)
    return model


def counting() -> PreTrainedModel:
    """Numbers the columns that go through its first layer, whatever their position ids are."""
    model = llama()
    model.model.layers[0].register_forward_hook(
        lambda _layer, _inputs, states: states + torch.arange(states.shape[1])[:, None]
    )
    return model


def test_a_window_that_a_family_has_and_does_not_use_is_no_obstacle() -> None:
    kinds = ["full_attention"] * 3
    model = seeded(lambda: qwen2_moe(use_sliding_window=False, layer_types=kinds))
    assert_equal_paths(model, lambda: sequence_logprobs(model, BATCH))


@torch.no_grad()
def test_rows_without_tokens_are_no_matter() -> None:
    model = seeded(llama)
    assert allow_packing(model)
    expected = sequence_logprobs(model, BATCH)
    empty = BATCH.attention_mask.clone()
    empty[2] = False
    some = replace(BATCH, attention_mask=empty)
    found = sequence_logprobs(model, some)
    assert not found[2].any()
    kept = torch.tensor([0, 1, 3, 4, 5, 6])
    assert_close(found[kept], expected[kept])
    assert not sequence_logprobs(model, replace(BATCH, attention_mask=empty & False)).any()


def test_a_long_row_does_not_widen_the_short_ones() -> None:
    rows = responses([4, 5, 60], [[3, 2], [3, 40], [2, 2]])
    compacted = compact(rows.input_ids, rows.attention_mask)
    segments = pack(compacted, find_trees(compacted, rows.group_ids)).segments
    cells = sum(part.own.numel() + part.before.numel() for part in segments.parts)
    computed = (4 + 5 + 60) + (3 + 2 + 3 + 40 + 2 + 2)
    assert cells <= 1.5 * (computed + 2 * 4 + 2 * 5 + 2 * 60)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (qwen2_moe, "its layers do not say how far they see"),
        (counting, "its hidden states would differ"),
        (bert_as_made, "its tokens see what follows them"),
        (mamba, "its attention is 'eager'"),
    ],
)
def test_other_models_go_on_with_padded_rows_and_the_log_says_so(
    build: Callable[[], PreTrainedModel],
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = seeded(build)
    with caplog.at_level(logging.INFO, "lrlhf"):
        assert not allow_packing(model)
    assert not packs(model)
    assert said in caplog.text


@torch.no_grad()
def test_generation_is_as_before_and_exports_name_no_attention_of_ours(tmp_path: object) -> None:
    model = seeded(llama)
    prompts = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7]])
    options = {"attention_mask": (prompts != 0).long(), "max_new_tokens": 8, "do_sample": False}
    before = model.generate(prompts, **options)
    assert allow_packing(model)
    assert torch.equal(model.generate(prompts, **options), before)
    model.save_pretrained(str(tmp_path))
    loaded = type(model).from_pretrained(str(tmp_path))
    assert loaded.config._attn_implementation == "sdpa"
