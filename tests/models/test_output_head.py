"""When log-probabilities may be computed from the output head's weight, and that it is the same."""

import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lrlhf.functional import LinearHead, token_logprobs
from lrlhf.models.output_head import OutputHead, check_output_head, output_head, plain_model
from lrlhf.models.sharding import within
from tests.conftest import build_language_model, build_tokenizer
from tests.models.text_families import tiny_model


def linear(**options: bool) -> nn.Linear:
    return nn.Linear(4, 9, bias=options.get("bias", False))


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_plain_layer_gives_its_own_weight() -> None:
    head = OutputHead(projection=linear(), multiplier=0.5, ruled_out=(3,))
    fast = head.fastest()
    assert isinstance(fast, LinearHead)
    assert fast.weight is head.projection.weight
    hidden, targets = torch.randn(6, 4), torch.tensor([0, 1, 2, 4, 5, 8])
    torch.testing.assert_close(
        token_logprobs(hidden, fast, targets),
        torch.log_softmax(head(hidden), dim=1).gather(1, targets[:, None])[:, 0],
    )


def test_a_layer_that_does_more_than_a_product_is_called() -> None:
    hooked = linear()
    hooked.register_forward_hook(lambda _module, _inputs, output: output * 2)
    prepared = linear()
    prepared.register_forward_pre_hook(lambda _module, _inputs: None)
    plain = OutputHead(projection=linear())
    for head in (
        replace(plain, softcap=30.0),
        replace(plain, projection=linear(bias=True)),
        replace(plain, projection=Doubled(4, 9, bias=False)),
        replace(plain, projection=hooked),
        replace(plain, projection=prepared),
        replace(plain, projection=nn.Sequential(linear())),
    ):
        assert head.fastest() is head
    assert plain.fastest() is not plain


def test_an_adapted_head_is_called_and_one_beside_adapters_is_not() -> None:
    options = {"r": 2, "task_type": "CAUSAL_LM"}
    model = build_language_model(build_tokenizer(), tie_word_embeddings=False)
    adapted = get_peft_model(model, LoraConfig(target_modules=["lm_head"], **options))
    assert isinstance(output_head(plain_model(adapted)).fastest(), OutputHead)
    model = build_language_model(build_tokenizer())
    beside = get_peft_model(model, LoraConfig(target_modules=["q_proj"], **options))
    fast = output_head(plain_model(beside)).fastest()
    assert isinstance(fast, LinearHead)
    assert not fast.weight.requires_grad


@pytest.fixture
def _alone() -> Iterator[None]:
    """A process group of one rank: weights are split, into one part."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(("own_group", "tied"), [(False, False), (False, True), (True, False)])
def test_a_split_head_gets_the_gradients_of_a_whole_one(own_group: bool, tied: bool) -> None:
    ids = torch.randint(5, 40, (2, 9))
    results = []
    for split in (False, True):
        model = build_language_model(build_tokenizer(), tie_word_embeddings=tied)
        if split:
            if own_group:
                fully_shard(model.lm_head, mesh=cpu_mesh())
            fully_shard(model, mesh=cpu_mesh())
        used: list[object] = []

        def compute(model: nn.Module = model, used: list[object] = used) -> Tensor:
            hidden = plain_model(model).base_model(ids).last_hidden_state  # type: ignore[arg-type]
            head = output_head(plain_model(model)).fastest()  # type: ignore[arg-type]
            used.append(head)
            return token_logprobs(hidden[:, :-1].reshape(-1, 32), head, ids[:, 1:].reshape(-1))

        logprobs = within(model, compute)
        logprobs.sum().backward()
        assert isinstance(used[0], OutputHead if split and own_group else LinearHead)
        results.append((logprobs.detach(), {n: full(p.grad) for n, p in model.named_parameters()}))
    torch.testing.assert_close(results[1], results[0])


def cpu_mesh() -> torch.distributed.device_mesh.DeviceMesh:
    return torch.distributed.init_device_mesh("cpu", (1,))


def full(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    if isinstance(gradient, torch.distributed.tensor.DTensor):
        return gradient.full_tensor()
    return gradient


def test_a_model_that_reads_the_padding_behind_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"CpmAntForCausalLM .*reads the padding"):
        check_output_head(tiny_model("cpmant"))
