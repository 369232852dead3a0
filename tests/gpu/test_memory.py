"""What saves memory on GPUs: gradients in parts, activations and checkpoints in main memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lrlhf.models import CausalLM
from lrlhf.run.checkpoints.background_saves import BackgroundSaves
from lrlhf.run.gradient_updates import device_memory
from tests.distributed.strategy_runs import run
from tests.distributed.test_strategies import assert_close, ends
from tests.gpu.memory_ranks import VARIANTS
from tests.gpu.test_ranks import on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


@pytest.mark.gpu_lines("lrlhf.models.token_budget.CudaMemory.size")
def test_the_memory_of_a_gpu_is_all_of_it() -> None:
    _, total = torch.cuda.mem_get_info()
    assert device_memory(torch.device("cuda")) == pytest.approx(total, rel=0.05)


@pytest.mark.gpu_lines(
    "lrlhf.run.checkpoints.background_saves", "lrlhf.run.checkpoints.sharded_checkpoint"
)
def test_copies_for_a_background_save_are_pinned_and_do_not_follow_the_weights() -> None:
    saves = BackgroundSaves(torch.device("cuda"))
    weight = torch.arange(1 << 16, dtype=torch.float32, device="cuda")
    copy = saves.copy({"w": weight})["w"]
    weight.zero_()
    torch.cuda.synchronize()
    assert copy.device.type == "cpu"
    assert copy.is_pinned()
    assert torch.equal(copy, torch.arange(1 << 16, dtype=torch.float32))
    saves.close()


@pytest.mark.gpu_lines("lrlhf.models.loading.pretrained")
def test_inputs_of_blocks_leave_the_gpu_until_the_backward_pass(tmp_path: Path) -> None:
    layers, hidden, rows, tokens = 8, 512, 8, 1024
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    ids = torch.randint(64, (rows, tokens), generator=torch.Generator().manual_seed(1)).cuda()

    def measured(*, offload: bool) -> tuple[int, dict[str, Tensor]]:
        spec = CausalLM(
            source=str(tmp_path), gradient_checkpointing=True, activation_offload=offload
        )
        model = spec.load().cuda().train()
        before = torch.cuda.memory_allocated()
        loss = model(input_ids=ids).logits.float().logsumexp(-1).mean()
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        return kept, {name: w.grad for name, w in model.named_parameters() if w.grad is not None}

    LlamaForCausalLM(config).save_pretrained(tmp_path)
    kept, plain = measured(offload=False)
    less, offloaded = measured(offload=True)
    # in float32; the last block's input may still be in use
    of_one = rows * tokens * hidden * 4
    assert kept - less >= (layers - 1) * of_one
    for name, gradient in plain.items():
        torch.testing.assert_close(offloaded[name], gradient)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_that_save_memory_end_where_one_process_does_and_resume(
    variant: str, accelerator: str, model_folder: str, tmp_path: Path
) -> None:
    devices = 2 if accelerator == "cpu" else min(2, torch.cuda.device_count())
    run("rloo", Path(model_folder), tmp_path / "alone")
    one = ends(tmp_path / "alone")
    resumed = ""
    for folder in (tmp_path / "whole", tmp_path / "again"):
        ranks = on_ranks(
            "rloo",
            variant,
            accelerator,
            devices,
            model_folder,
            folder,
            resumed=resumed,
            program="tests.gpu.memory_ranks",
        )
        assert_close(ranks, one)
        resumed = str(folder)
