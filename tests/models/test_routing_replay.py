"""Routing replay: recorded experts compute, with weights that are the model's own.

What is expected comes from rows that go through the model one by one, without padding, in which a
plain loop over tokens and experts stands in for every block of experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from lrlhf.models import allow_packing, allow_replay, packs, sequence_logprobs, sequence_outputs
from lrlhf.models.backbone import hidden_states
from lrlhf.types import SequenceBatch
from tests.models.families import left_padded, llama, seeded
from tests.models.test_packing import BATCH, assert_same_gradients, gradients
from tests.models.text_families import tiny_config, tiny_model

LOOPED = ["mixtral", "qwen3_moe"]
FAMILIES = [*LOOPED, "gpt_oss", "olmoe", "granitemoe", "deepseek_v3", "qwen3_5_moe_text"]
PADDED = ["gpt_oss", "qwen3_5_moe_text"]
"""Pack no rows."""


def experts_of(family: str, *, packed: bool = False, **options: Any) -> PreTrainedModel:
    """Of float64, which pads its rows or packs them."""
    config = tiny_config(family)
    for name, value in options.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model: PreTrainedModel = type(tiny_model(family))(config).eval().double()
    model.set_experts_implementation("eager")  # grouped products know no float64
    assert not packed or allow_packing(model) or family in PADDED
    return model


def routers_of(model: PreTrainedModel) -> list[Any]:
    return [
        module
        for module in model.modules()
        if hasattr(module, "top_k") and hasattr(module, "weight")
    ]


@contextmanager
def watched(modules: list[Any], see: Callable[[int, Any, Any], Any]) -> Iterator[None]:
    """Call ``see`` with number, inputs and output of each module that is run."""
    handles = [
        module.register_forward_hook(lambda _, inputs, out, at=at: see(at, inputs, out))
        for at, module in enumerate(modules)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rows_of(batch: SequenceBatch) -> list[Tensor]:
    return [ids[mask] for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]


@torch.no_grad()
def with_own_choice(model: PreTrainedModel, batch: SequenceBatch) -> SequenceBatch:
    """Record what the routers choose for each token of each row but its last."""
    layers, k = len(routers_of(model)), routers_of(model)[0].top_k
    experts = torch.full((*batch.input_ids.shape, layers, k), -1, dtype=torch.int16)
    for row, ids in enumerate(rows_of(batch)):
        at = batch.attention_mask[row].nonzero()[:-1, 0]

        def see(layer: int, _: Any, out: Any, row: int = row, at: Tensor = at) -> None:
            chosen = next(each for each in out if not each.is_floating_point())
            experts[row, at, layer] = chosen[:-1].to(torch.int16)

        with watched(routers_of(model), see):
            model(input_ids=ids[None], use_cache=False)
    return replace(batch, routed_experts=experts)


def loop(block: Any, hidden: Tensor, chosen: Tensor, *, renormalised: bool) -> Tensor:
    """The output of a block: token by token, expert by expert."""
    outputs = []
    for state, own in zip(hidden.flatten(0, 1), chosen.tolist(), strict=True):
        scores = block.gate.weight @ state
        if own[0] < 0:
            own = scores.argsort(descending=True)[: len(own)].tolist()
        total = torch.zeros_like(state)
        among = scores[own] if renormalised else scores
        for expert in own:
            gate, up = (block.experts.gate_up_proj[expert] @ state).chunk(2)
            out = block.experts.down_proj[expert] @ (gate / (1 + (-gate).exp()) * up)
            total = total + (scores[expert].exp() / among.exp().sum()) * out
        outputs.append(total)
    return torch.stack(outputs).view_as(hidden)


def looped_logprobs(
    model: PreTrainedModel, batch: SequenceBatch, *, renormalised: bool = True
) -> Tensor:
    """`[B, T]`: log-probabilities of the response tokens, through the recorded experts."""
    assert batch.routed_experts is not None
    blocks = [layer.mlp for layer in model.model.layers]
    result = torch.zeros(batch.input_ids.shape, dtype=model.dtype)
    for row, ids in enumerate(rows_of(batch)):
        columns = batch.attention_mask[row].nonzero()[:, 0]
        chosen = batch.routed_experts[row, columns]

        def see(layer: int, inputs: Any, _: Any, chosen: Tensor = chosen) -> Tensor:
            return loop(blocks[layer], inputs[0], chosen[:, layer], renormalised=renormalised)

        with watched(blocks, see):
            spread = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        own = spread[:-1].gather(1, ids[1:, None])[:, 0]
        result = result.index_put((torch.tensor(row), columns[1:]), own)
    return result * batch.response_mask


def replayed(model: PreTrainedModel, batch: SequenceBatch) -> Tensor:
    return sequence_outputs(model, batch, replay=True).logprobs


def move_routers(model: PreTrainedModel) -> None:
    """So far that they choose otherwise."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for router in routers_of(model):
            noise = torch.randn(router.weight.shape, generator=generator).to(router.weight)
            router.weight.add_(router.weight.std() * noise)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_replays_its_own_choice_computes_what_it_does_freely(
    family: str, packed: bool
) -> None:
    model = experts_of(family, packed=packed)
    batch = with_own_choice(model, BATCH)
    free = gradients(model, lambda: sequence_logprobs(model, batch))
    allow_replay(model)
    assert_same_gradients(gradients(model, lambda: replayed(model, batch)), free, atol=1e-9)
    assert any("gate" in name or "router" in name for name in free[1])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("family", "options", "renormalised"),
    [
        ("mixtral", {}, True),
        ("qwen3_moe", {"norm_topk_prob": True}, True),
        ("qwen3_moe", {"norm_topk_prob": False}, False),
    ],
)
def test_other_weights_replay_what_a_loop_over_tokens_and_experts_computes(
    family: str, options: dict[str, Any], renormalised: bool, packed: bool
) -> None:
    model = experts_of(family, packed=packed, **options)
    plain = experts_of(family, **options)
    batch = with_own_choice(plain, BATCH)
    for each in (model, plain):
        move_routers(each)
    assert (
        with_own_choice(plain, BATCH).routed_experts != batch.routed_experts
    ).float().mean() > 0.1
    allow_replay(model)
    expected = gradients(plain, lambda: looped_logprobs(plain, batch, renormalised=renormalised))
    # the routers take their softmax in float32
    assert_same_gradients(gradients(model, lambda: replayed(model, batch)), expected, atol=2e-5)
    free = sequence_logprobs(model, batch)
    assert (free - expected[0])[batch.response_mask].abs().max() > 0.1
    assert packs(model) is packed


def checkpointed(model: PreTrainedModel) -> PreTrainedModel:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", LOOPED)
def test_what_is_recomputed_replays_its_own_micro_batch(family: str, packed: bool) -> None:
    model = experts_of(family, packed=packed)
    batch = with_own_choice(experts_of(family), BATCH)
    parts = [batch.select(rows) for rows in torch.arange(7).split(3)]
    move_routers(model)
    allow_replay(model)

    def compute() -> Tensor:  # all go forward, and free rows too, before any goes backward
        through = [replayed(model, part).flatten() for part in parts]
        return torch.cat([*through, sequence_logprobs(model, batch).flatten()])

    expected = gradients(model, compute)
    assert_same_gradients(gradients(checkpointed(model), compute), expected, atol=0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", LOOPED)
def test_order_padding_and_micro_batches_do_not_matter(family: str, packed: bool) -> None:
    model = experts_of(family, packed=packed)
    batch = with_own_choice(experts_of(family), BATCH)
    move_routers(model)
    allow_replay(model)
    whole = replayed(model, batch)
    assert (whole - sequence_logprobs(model, batch)).abs().max() > 0.1
    order = torch.tensor([6, 2, 0, 5, 1, 4, 3])
    close = {"rtol": 0, "atol": 1e-7}  # of the float32 in the routers
    assert_close(replayed(model, batch.select(order)), whole[order], **close)
    for rows in torch.arange(7).split(3):
        assert_close(replayed(model, batch.select(rows)), whole[rows], **close)
    moved = left_padded(replace(batch, group_ids=None, routed_experts=None), extra=3)
    experts = torch.zeros(*moved.input_ids.shape, *batch.routed_experts.shape[2:])
    experts[moved.attention_mask] = batch.routed_experts[batch.attention_mask].float()
    moved = replace(moved, routed_experts=experts.to(torch.int16), group_ids=batch.group_ids)
    assert_close(replayed(model, moved)[moved.response_mask], whole[batch.response_mask], **close)
    everything = int(batch.lengths.sum())
    assert not packed or hidden_states(model, batch, replay=True).computed.numel() < everything


def test_rows_share_no_token_that_went_through_other_experts() -> None:
    model = experts_of("mixtral", packed=True)
    batch = with_own_choice(model, BATCH)
    row = int(batch.group_ids.tolist().index(0))
    assert int(batch.response_mask[row].int().argmax()) == 11
    experts = batch.routed_experts.clone()
    experts[row, 4, 1] = (experts[row, 4, 1] + 1) % 4
    batch = replace(batch, routed_experts=experts)
    allow_replay(model)
    alone = torch.cat([replayed(model, batch.select(torch.tensor([r]))) for r in range(7)])
    assert_close(replayed(model, batch), alone, rtol=0, atol=1e-7)
    # of four rows with a prompt of eleven tokens, the first four are computed once
    fewer = hidden_states(model, batch).computed.numel()
    assert hidden_states(model, batch, replay=True).computed.numel() == fewer + 3 * (11 - 4)


@pytest.mark.parametrize("packed", [False, True])
def test_branches_of_a_row_replay_their_own(packed: bool) -> None:
    """The second branch follows the third token, so it sees what a row without the first does."""
    model = experts_of("qwen3_moe", packed=packed)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    forks = torch.tensor([[0, 0, 0, 0, 0, 2, 0, 0]])
    ones = torch.ones_like(ids, dtype=torch.bool)
    generator = torch.Generator().manual_seed(1)
    experts = torch.rand((1, 8, 2, 4), generator=generator).argsort(dim=-1)[..., :2]
    row = SequenceBatch(
        input_ids=ids, attention_mask=ones, response_mask=ones, routed_experts=experts
    )
    allow_replay(model)
    found = replayed(model, replace(row, forks=forks))[0]
    for columns in ([0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 7]):
        branch = row.map(lambda tensor, columns=columns: tensor[:, columns])
        expected = looped_logprobs(experts_of("qwen3_moe"), branch, renormalised=False)
        assert_close(found[columns], expected[0], rtol=0, atol=1e-6)


def test_experts_are_balanced_by_the_scores_of_the_router() -> None:
    """The scores of the first layer do not depend on any choice."""
    model = experts_of("mixtral", num_hidden_layers=1)
    batch = with_own_choice(model, BATCH)
    move_routers(model)
    free = sequence_outputs(model, batch, router_loss=True)
    allow_replay(model)
    out = sequence_outputs(model, batch, router_loss=True, replay=True)
    assert (out.logprobs - free.logprobs).abs().max() > 0.1
    assert_close(out.router_loss, free.router_loss)


def test_experts_are_replayed_only_where_that_is_asked_for() -> None:
    model = experts_of("mixtral")
    batch = with_own_choice(model, BATCH)
    free = sequence_logprobs(model, batch)
    allow_replay(model)
    other = replace(batch, routed_experts=(batch.routed_experts + 1) % 4)
    assert torch.equal(sequence_logprobs(model, other), free)
    assert (replayed(model, other) - free).abs().max() > 0.1
    assert torch.equal(replayed(model, replace(batch, routed_experts=None)), free)


def with_copied_routers(name: str) -> peft.PeftModel:
    adapters = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=[name])
    return peft.get_peft_model(experts_of("mixtral"), adapters)


@pytest.mark.parametrize(
    ("model", "lack"),
    [
        (lambda: seeded(llama), "LlamaForCausalLM has no experts, or none whose routers"),
        (lambda: tiny_model("jamba"), "JambaForCausalLM has no experts, or none whose routers"),
        (lambda: with_copied_routers("gate"), "there are two routers per layer"),
        (lambda: with_copied_routers("mlp"), "there are two routers per layer"),
    ],
)
def test_models_without_routers_are_refused(model: Any, lack: str) -> None:
    with pytest.raises(ValueError, match=f"update.replay_routing: {lack}"):
        allow_replay(model())


def test_a_router_whose_choice_is_unknown_is_refused() -> None:
    model, batch = tiny_model("phimoe"), with_own_choice(experts_of("mixtral"), BATCH)
    allow_replay(model)
    with pytest.raises(ValueError, match="PhimoeTopKRouter calls topk 0 times"):
        replayed(model, batch)


@pytest.mark.parametrize("options", [{"num_hidden_layers": 3}, {"num_experts_per_tok": 3}])
def test_experts_of_another_model_are_refused(options: dict[str, int]) -> None:
    model, batch = experts_of("mixtral"), with_own_choice(experts_of("mixtral", **options), BATCH)
    allow_replay(model)
    with pytest.raises(
        ValueError, match=r"recorded are \((3, 2|2, 3)\), and those of MixtralForCausalLM \(2, 2\)"
    ):
        replayed(model, batch)


def test_layers_that_are_not_told_are_noticed() -> None:
    model = experts_of("mixtral")
    batch = with_own_choice(model, BATCH)
    with pytest.raises(ValueError, match="2 layers of MixtralForCausalLM take no experts"):
        replayed(model, batch)  # `allow_replay` was forgotten
