from collections.abc import Callable

import pytest
import torch
from torch.testing import assert_close
from transformers import PreTrainedModel, T5Config, T5Model

from lrlhf.models import HeadConfig, HeadedBackbone, RewardNetwork
from lrlhf.models.loading.pretrained import freeze_modules
from lrlhf.models.scorers import blocks_of
from lrlhf.types import SequenceBatch
from tests.models.families import (
    bert,
    cohere,
    gemma2,
    gpt2,
    left_padded,
    llama,
    right_padded,
    seeded,
)

BACKBONES = [llama, gpt2, gemma2, cohere, bert]


def body(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    return seeded(build).base_model


def network(build: Callable[[], PreTrainedModel] = llama, **options: object) -> RewardNetwork:
    torch.manual_seed(5)
    return RewardNetwork(HeadedBackbone(body(build), HeadConfig(**options)))


def weights(net: RewardNetwork, head: str = "reward") -> torch.Tensor:
    return net.scorer.heads[head].projection.weight[0]


def randomised(net: RewardNetwork) -> RewardNetwork:
    """With attention pooling that is no plain mean."""
    with torch.no_grad():
        for weight in net.scorer.heads.parameters():
            weight.normal_()
    return net


def test_the_last_token_counts_also_where_it_is_the_padding_token() -> None:
    net, batch = network(), right_padded([9, 6])
    ids = batch.input_ids.clone()
    ids[1, 5] = 0  # the sequence ends with the id that also pads
    ended = SequenceBatch(
        input_ids=ids, attention_mask=batch.attention_mask, response_mask=batch.response_mask
    )
    hidden = net.scorer.backbone(input_ids=ids[1:, :6]).last_hidden_state
    expected = hidden[0, 5] @ weights(net)
    assert_close(net(ended)[1, 0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "pooling"),
    [(llama, "last"), (gpt2, "attention"), (gemma2, "mean"), (bert, "mean"), (bert, "last")],
)
def test_a_score_depends_on_no_padding_and_no_other_row(
    build: Callable[[], PreTrainedModel], pooling: str
) -> None:
    net, batch = randomised(network(build, pooling=pooling)), right_padded([9, 6, 3])
    together = net(batch)
    assert_close(net(left_padded(batch, extra=3)), together, rtol=1e-4, atol=1e-4)
    for row, length in enumerate([9, 6, 3]):
        alone = batch.map(lambda tensor, row=row, length=length: tensor[row : row + 1, :length])
        assert_close(net(alone)[0], together[row], rtol=1e-4, atol=1e-4)
    other = SequenceBatch(
        input_ids=batch.input_ids.masked_fill(~batch.attention_mask, 17),
        attention_mask=batch.attention_mask,
        response_mask=batch.response_mask,
    )
    assert_close(net(other), together, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("build", "layer"), [*zip(BACKBONES, [1, 2, 3, 1, 2], strict=True)])
def test_layer_k_is_what_block_k_returns(build: Callable[[], PreTrainedModel], layer: int) -> None:
    net, batch = network(build, layer=layer), right_padded([9])
    outputs = []
    for block in blocks_of(net.scorer.backbone):
        block.register_forward_hook(
            lambda _m, _i, out: outputs.append(out[0] if isinstance(out, tuple) else out)
        )
    hidden = net.scorer.hidden_states(batch).unpacked()
    assert len(outputs) == 3
    assert torch.equal(hidden, outputs[layer - 1])
    if build is llama:  # the last hidden state has gone through the final norm
        last = network(build, layer=-1).scorer.hidden_states(batch).unpacked()
        assert_close(seeded(llama).base_model.norm(outputs[-1]), last)


@pytest.mark.parametrize(("build", "layer"), [*zip(BACKBONES, [-1, 2, 2, -1, -1], strict=True)])
def test_every_trainable_parameter_receives_a_gradient(
    build: Callable[[], PreTrainedModel], layer: int
) -> None:
    net = randomised(network(build, layer=layer, pooling="attention", learn_scale=True))
    net(right_padded([9, 6])).sum().backward()
    lacking = [n for n, w in net.named_parameters() if w.requires_grad and w.grad is None]
    assert not lacking
    frozen = {n for n, w in net.scorer.backbone.named_parameters() if not w.requires_grad}
    if layer == -1:
        assert all("pooler" in name for name in frozen)
    else:
        blocks = blocks_of(net.scorer.backbone)
        assert all(not w.requires_grad for w in blocks[2].parameters())
        assert all(w.requires_grad for block in blocks[:2] for w in block.parameters())


def test_scores_are_float32_also_in_autocast_and_from_a_16_bit_backbone() -> None:
    net, batch = network(), right_padded([9])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert net(batch).dtype == torch.float32
    half = RewardNetwork(HeadedBackbone(body(llama).bfloat16(), HeadConfig()))
    assert half(batch).dtype == torch.float32
    assert weights(half).dtype == torch.float32


def test_new_heads_depend_on_the_seed_and_on_nothing_drawn_since() -> None:
    first = weights(network()).detach()
    torch.manual_seed(5)
    torch.rand(100)
    again = RewardNetwork(HeadedBackbone(body(llama), HeadConfig()))
    assert torch.equal(weights(again), first)
    torch.manual_seed(6)
    other = RewardNetwork(HeadedBackbone(body(llama), HeadConfig()))
    assert not torch.equal(weights(other), first)


def test_freezing_stops_the_named_modules_and_all_inside_them() -> None:
    model = body(llama)
    freeze_modules(model, ["embed_tokens", "layers.[01]"])
    learning = {n.split(".self")[0] for n, w in model.named_parameters() if w.requires_grad}
    assert not {"embed_tokens.weight", "layers.0", "layers.1"} & learning
    assert {"layers.2", "norm.weight"} <= learning


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'embed_token' matches no module.*embed_tokens"):
        freeze_modules(body(llama), ["embed_token"])
    for layer in (-2, 0, 4):
        with pytest.raises(ValueError, match=rf"layer: {layer} is not there. Use 1 to 3"):
            network(layer=layer)
    model = T5Model(T5Config(vocab_size=50, d_model=16, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="T5Model is an encoder-decoder"):
        HeadedBackbone(model, HeadConfig())
