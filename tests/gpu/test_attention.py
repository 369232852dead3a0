"""Packed rows, log-probabilities and deterministic runs on a GPU.

What is expected comes from padded rows through ``sdpa``, from float64, or from a second run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.testing import assert_close
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lrlhf.datamodules import PromptDataModule
from lrlhf.functional import linear_logprobs, online_softmax, token_logprobs, token_statistics
from lrlhf.models import allow_packing, sequence_logprobs
from lrlhf.models.backbone import keep_attention
from lrlhf.models.loading.pretrained import compile_layers
from lrlhf.models.packed import packed_attention as attention
from lrlhf.models.packed.packing import compact, find_trees, pack
from lrlhf.models.sharding import device_of
from lrlhf.modules import PPO, RLOO, Critic
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling
from lrlhf.rollout.engines.token_sampler import _cumsum
from lrlhf.types import SequenceBatch
from tests.models.families import seeded
from tests.models.test_forks import BATCH as FORKS
from tests.models.test_forks import TURNS, of_turns
from tests.models.test_packing import assert_same_gradients, gradients, responses
from tests.modules.policy_runs import letters, sgd, weights

# read at the first matrix product of the process
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

SIZES = {
    "vocab_size": 50,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
BATCH = responses([200, 90, 3], [[150, 140, 20, 1], [300, 7], [40]])


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=70))


def small_heads() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "head_dim": 8}))


def sinks() -> PreTrainedModel:
    sizes = {**SIZES, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 70}
    return GptOssForCausalLM(GptOssConfig(**sizes))


@pytest.fixture(autouse=True)
def flexed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether FlexAttention computed each layer that was asked for; float32 means float32."""
    found: list[bool] = []
    compute = attention.flex_attention

    def noting(*inputs: Any, **options: Any) -> Tensor | None:
        result = compute(*inputs, **options)
        found.append(result is not None)
        return result

    monkeypatch.setattr(attention, "flex_attention", noting)
    torch.set_float32_matmul_precision("highest")
    yield found
    torch.use_deterministic_algorithms(False)


def on_gpu(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    return seeded(build).cuda()


def by_turn(batch: SequenceBatch, model: PreTrainedModel) -> Callable[[], Tensor]:
    own = batch.to("cuda")
    return lambda: of_turns(own, sequence_logprobs(model, own))


# ------------------------------------------------------------------ FlexAttention


@pytest.mark.gpu_lines("lrlhf.models.backbone._uses_depth_first_order")
@pytest.mark.parametrize("build", [llama, mistral])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_packed_rows_and_their_gradients_are_those_of_padded_ones(
    build: Callable[[], PreTrainedModel], checkpoints: bool, flexed: list[bool]
) -> None:
    attention.tried.cache_clear()  # the trial is part of the first, checkpointed pass
    model = on_gpu(build)
    padded, turns = by_turn(BATCH, model), by_turn(TURNS, model)
    expected, of_forks = gradients(model, padded), gradients(model, turns)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    assert allow_packing(model)
    assert_same_gradients(gradients(model, padded), expected, atol=1e-4)
    assert_same_gradients(gradients(model, by_turn(FORKS, model)), of_forks, atol=1e-4)
    assert flexed
    assert all(flexed)


def test_in_bfloat16_it_is_as_near_to_float32_as_padded_rows_are(flexed: list[bool]) -> None:
    model = on_gpu(llama)
    with torch.no_grad():
        exact = by_turn(BATCH, model)()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            padded = by_turn(BATCH, model)()
            assert allow_packing(model)
            packed = by_turn(BATCH, model)()
    assert flexed == [True, True]
    assert (packed - exact).abs().mean() <= 1.5 * (padded - exact).abs().mean()


@pytest.mark.gpu_lines("lrlhf.models.packed.packed_attention.varlen_obstacle")
@pytest.mark.parametrize("build", [llama, mistral])
def test_rows_that_share_nothing_go_through_flash_attention(
    build: Callable[[], PreTrainedModel], flexed: list[bool]
) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("FlashAttention needs an Ampere GPU or a newer one")
    model, batch = on_gpu(build), replace(BATCH, group_ids=None)
    results = {"exact": gradients(model, by_turn(batch, model))}
    for name in ("sdpa", "flex_attention", None):
        model = on_gpu(build)
        if name is not None:
            model.set_attn_implementation(name)
        assert name == "sdpa" or allow_packing(model)  # else its rows are padded
        with torch.autocast("cuda", dtype=torch.bfloat16):
            results[name or "varlen"] = gradients(model, by_turn(batch, model))
    assert flexed == [True, True]  # where it was asked for
    exact, slopes = results.pop("exact")
    errors = {
        name: [
            float((logprobs - exact).norm()),
            *(float((own[key] - slope).norm()) for key, slope in slopes.items()),
        ]
        for name, (logprobs, own) in results.items()
    }
    for other in ("sdpa", "flex_attention"):
        for found, expected in zip(errors["varlen"], errors[other], strict=True):
            assert found <= 2 * expected


def test_attention_sinks_go_through_flex_attention_where_it_is_asked_for(
    flexed: list[bool],
) -> None:
    model = on_gpu(sinks)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = by_turn(BATCH, model)()
        model.set_attn_implementation("flex_attention")
        assert allow_packing(model)
        assert_close(by_turn(BATCH, model)(), expected, rtol=0, atol=1e-4)
    assert flexed == [True, True]


@pytest.mark.gpu_lines("lrlhf.models.packed.packed_attention")
@pytest.mark.parametrize("changed", ["small heads", "float64", "sdpa"])
def test_what_it_does_not_compute_goes_through_sdpa(changed: str, flexed: list[bool]) -> None:
    model = on_gpu(small_heads if changed == "small heads" else llama)
    model = model.double() if changed == "float64" else model
    expected = gradients(model, by_turn(BATCH, model))
    keep_attention(model, "sdpa" if changed == "sdpa" else None)
    assert allow_packing(model)
    assert_same_gradients(gradients(model, by_turn(BATCH, model)), expected, atol=1e-4)
    assert not any(flexed)


def test_compiled_layers_call_it_too(flexed: list[bool]) -> None:
    model = on_gpu(llama)
    expected = gradients(model, by_turn(BATCH, model))
    compile_layers(model)
    assert allow_packing(model)
    assert_same_gradients(gradients(model, by_turn(BATCH, model)), expected, atol=1e-4)
    assert flexed == [True, True]


def test_batches_of_many_lengths_are_compiled_a_few_times_only(flexed: list[bool]) -> None:
    model = on_gpu(llama)
    assert allow_packing(model)
    torch._dynamo.utils.counters.clear()
    for length in range(100, 400, 30):
        batch = responses([length], [[length, 40]])
        gradients(model, by_turn(batch, model))
        with torch.no_grad():
            by_turn(batch, model)()
    assert all(flexed)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 8


def test_its_blocks_are_those_of_the_whole_table() -> None:
    rows = compact(*(part.cuda() for part in (BATCH.input_ids, BATCH.attention_mask)))
    depth_first = pack(
        rows, find_trees(rows, BATCH.group_ids), depth_first=True
    ).segments.depth_first
    assert depth_first is not None
    for window in (None, 70):
        mask, count = depth_first.mask(window), len(depth_first.enter)
        assert mask.kv_indices.is_cuda
        whole = create_block_mask(mask.mask_mod, 1, 1, count, count, device="cuda")
        assert torch.equal(mask.full_kv_num_blocks, whole.full_kv_num_blocks)
        assert (mask.kv_num_blocks >= whole.kv_num_blocks).all()


def test_it_keeps_less_than_masks_and_copies_of_a_prompt_do(flexed: list[bool]) -> None:
    batch = responses([400], [[300] * 8])
    kept = {}
    for asked in ("sdpa", None):
        model = on_gpu(llama)
        keep_attention(model, asked)
        assert allow_packing(model)
        compute = by_turn(batch, model)
        gradients(model, compute)  # what is compiled and cached is no part of it
        before = torch.cuda.memory_allocated()
        result = compute()
        kept[asked] = torch.cuda.memory_allocated() - before
        del result
    assert flexed
    assert kept[None] < kept["sdpa"]


@pytest.mark.gpu_lines("lrlhf.models.packed.packed_attention")
def test_flash_attention_is_called_under_its_own_name(flexed: list[bool]) -> None:
    pytest.importorskip("flash_attn")
    model = on_gpu(llama).bfloat16()
    with torch.no_grad():
        expected = by_turn(BATCH, model)()
        model.set_attn_implementation("flash_attention_2")
        keep_attention(model, "flash_attention_2")
        padded = by_turn(BATCH, model)()
        assert allow_packing(model)
        packed = by_turn(BATCH, model)()
    assert (padded - expected).abs().mean() < 2e-2
    assert (packed - expected).abs().mean() < 2e-2
    assert flexed == [True, True]


# ------------------------------------------------------------------ the output head


@pytest.mark.gpu_lines("lrlhf.functional.linear_logprobs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True])
def test_log_probabilities_and_gradients_are_those_of_float64(
    dtype: torch.dtype, entropy: bool, device: torch.device
) -> None:
    torch.manual_seed(1)
    hidden = torch.randn(300, 64, device=device, dtype=dtype)
    weight = torch.randn(5000, 64, device=device, dtype=dtype) / 8
    targets = torch.randint(5000, (300,), device=device)
    upstream = torch.randn(300, device=device, dtype=torch.float64)

    def gradients_of(kind: torch.dtype, whole: bool) -> tuple[Tensor, ...]:
        h, w = (part.detach().to(kind).requires_grad_() for part in (hidden, weight))
        if whole:
            log_p = (h @ w.T / 0.7).log_softmax(-1)
            found = log_p.gather(1, targets[:, None])[:, 0]
            chaos = -(log_p.exp() * log_p).sum(-1)
        else:
            both = token_logprobs(
                h, w, targets, temperature=0.7, chunk_size=128, return_entropy=True
            )
            found, chaos = both.logprobs, both.entropy
        (
            found * upstream.to(found) + (chaos * upstream.to(found) if entropy else 0)
        ).sum().backward()
        assert h.grad is not None
        assert w.grad is not None
        return found.detach(), chaos.detach(), h.grad, w.grad

    actual = gradients_of(dtype, whole=False)
    expected = gradients_of(torch.float64, whole=True)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.gpu_lines("lrlhf.functional.online_softmax", "lrlhf.functional.softmax_kernels")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("linear", [False, True])
def test_kernels_compute_what_pytorch_does(
    dtype: torch.dtype,
    tolerance: float,
    entropy: bool,
    linear: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(1)
    hidden = torch.randn(300, 64, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(9001, 64, device=device, dtype=dtype) / 8).requires_grad_()
    targets = torch.randint(9001, (300,), device=device)

    def computed() -> list[Tensor]:
        found = token_statistics(
            hidden,
            weight if linear else lambda states: states @ weight.T,
            targets,
            temperature=0.7,
            chunk_size=128,
            return_entropy=entropy,
        )
        values = [each for each in found[:2] if each is not None]
        loss = sum(each.sum() for each in values)
        return [*values, *torch.autograd.grad(loss, (hidden, weight))]

    monkeypatch.setattr(linear_logprobs, "_LARGE_BLOCK", 100 * 4096)
    actual = computed()
    monkeypatch.setattr(online_softmax, "_KERNEL_DEVICES", set())
    for one, other in zip(actual, computed(), strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


# ------------------------------------------------------------------ deterministic mode


@pytest.mark.parametrize("kind", [RLOO, PPO])
def test_deterministic_runs_end_with_the_same_weights(
    kind: type[RLOO | PPO],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    flexed: list[bool],
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(f'{{"prompt": "say {word}"}}' for word in "abcdefgh"))
    ends = []
    for number in range(2):
        model = seeded(
            lambda: LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": len(tokenizer)}))
        )
        critic = {} if kind is RLOO else {"critic": Critic(optimizer=sgd(1e-2))}
        module = kind(
            model,
            Rewards([letters]),
            tokenizer=tokenizer,
            num_generations=4,
            sampling=Sampling(max_new_tokens=6, top_p=0.9),
            optimizer=sgd(1e-2),
            **critic,
        )
        trainer = L.Trainer(
            accelerator="gpu",
            devices=1,
            deterministic=True,
            max_steps=2,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            use_distributed_sampler=False,
            default_root_dir=tmp_path / str(number),
        )
        trainer.fit(module, datamodule=PromptDataModule(train=str(prompts), batch_size=4))
        ends.append({name: value.cpu() for name, value in weights(module).items()})
    assert any(flexed)
    for name, value in ends[0].items():
        assert torch.equal(ends[1][name], value), name


def test_whole_numbers_are_cumulated_where_cuda_refuses_fractions() -> None:
    numbers = torch.rand(4, 1000, dtype=torch.float64)
    numbers /= numbers.sum(dim=1, keepdim=True)
    expected = numbers.cumsum(dim=1)
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError, match="cumsum"):
        numbers.cuda().cumsum(dim=1)
    assert_close(_cumsum(numbers.cuda()).cpu(), expected, rtol=0, atol=1e-12)


# ------------------------------------------------------------------ devices


@pytest.mark.gpu_lines("lrlhf.models.sharding.device_of", "lrlhf.models.zero.device")
def test_a_sharded_model_computes_on_the_gpu_while_its_weights_rest_in_main_memory(
    tmp_path: Path,
) -> None:
    mesh = torch.distributed.device_mesh
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = seeded(llama)
        torch.distributed.fsdp.fully_shard(
            model,
            mesh=mesh.init_device_mesh("cuda", (1,)),
            offload_policy=torch.distributed.fsdp.CPUOffloadPolicy(),
        )
        assert next(model.parameters()).device.type == "cpu"
        assert device_of(model) == torch.device("cuda", torch.cuda.current_device())
    finally:
        torch.distributed.destroy_process_group()
