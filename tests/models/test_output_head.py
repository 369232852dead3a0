"""When log-probabilities may be computed from the output head's weight, and that it is the same."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lrlhf.functional import LinearHead, token_logprobs
from lrlhf.models.heads import OutputHead, check_output_head, output_head, plain_model
from lrlhf.models.sharding import within
from tests.conftest import build_language_model, build_tokenizer
from tests.models.text_families import tiny_model


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_plain_layer_gives_its_own_weight() -> None:
    head = OutputHead(projection=nn.Linear(4, 9, bias=False), multiplier=0.5, ruled_out=(3,))
    fast = head.fastest()
    assert isinstance(fast, LinearHead)
    assert fast.weight is head.projection.weight
    hidden, targets = torch.randn(6, 4), torch.tensor([0, 1, 2, 4, 5, 8])
    torch.testing.assert_close(
        token_logprobs(hidden, fast, targets),
        torch.log_softmax(head(hidden), dim=1).gather(1, targets[:, None])[:, 0],
    )


def test_a_layer_that_does_more_than_a_product_is_called() -> None:
    hooked = nn.Linear(4, 9, bias=False)
    hooked.register_forward_hook(lambda _module, _inputs, output: output * 2)
    prepared = nn.Linear(4, 9, bias=False)
    prepared.register_forward_pre_hook(lambda _module, _inputs: None)
    plain = OutputHead(projection=nn.Linear(4, 9, bias=False))
    for head in (
        replace(plain, softcap=30.0),
        replace(plain, projection=nn.Linear(4, 9)),
        replace(plain, projection=Doubled(4, 9, bias=False)),
        replace(plain, projection=hooked),
        replace(plain, projection=prepared),
        replace(plain, projection=nn.Sequential(nn.Linear(4, 9, bias=False))),
    ):
        assert head.fastest() is head
    assert plain.fastest() is not plain


def test_an_adapted_head_is_called_and_one_beside_adapters_is_not() -> None:
    for target, kind in (("lm_head", OutputHead), ("q_proj", LinearHead)):
        model = build_language_model(build_tokenizer(), tie_word_embeddings=False)
        lora = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=[target])
        adapted = get_peft_model(model, lora)
        assert isinstance(output_head(plain_model(adapted)).fastest(), kind)


@pytest.mark.parametrize(("own_group", "tied"), [(False, True), (True, False)])
def test_a_split_head_gets_the_gradients_of_a_whole_one(own_group: bool, tied: bool) -> None:
    ids = torch.randint(5, 40, (2, 9))
    model = build_language_model(build_tokenizer(), tie_word_embeddings=tied)
    used: list[object] = []

    def logprobs() -> Tensor:
        hidden = model.base_model(ids).last_hidden_state
        used.append(output_head(model).fastest())
        return token_logprobs(hidden[:, :-1].reshape(-1, 32), used[-1], ids[:, 1:].reshape(-1))

    expected = logprobs()
    expected.sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    # one rank: weights are split, into one part
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for part in [model.lm_head, model] if own_group else [model]:
            fully_shard(part, mesh=mesh)
        actual = within(model, logprobs)
        actual.sum().backward()
        found = {name: weight.grad.full_tensor() for name, weight in model.named_parameters()}
    finally:
        torch.distributed.destroy_process_group()
    assert isinstance(used[1], OutputHead if own_group else LinearHead)
    torch.testing.assert_close((actual, found), (expected, gradients))


def test_a_model_that_reads_the_padding_behind_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"CpmAntForCausalLM .*reads the padding"):
        check_output_head(tiny_model("cpmant"))
