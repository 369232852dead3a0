"""What saves memory on GPUs: gradients in parts, activations and checkpoints in main memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lrlhf.callbacks import RLCheckpoint
from lrlhf.models import CausalLM
from lrlhf.modules import RLOO
from lrlhf.run.checkpoints.background_saves import BackgroundSaves
from lrlhf.run.checkpoints.checkpoint_reader import read_folder
from lrlhf.run.gradient_reduction import device_memory
from lrlhf.strategies import FSDP2
from tests.distributed.strategy_runs import MODULES, data_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]

GPUS = torch.cuda.device_count()
TWO_GPUS = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, found {GPUS}")


def test_the_memory_of_a_gpu_is_all_of_it() -> None:
    _, total = torch.cuda.mem_get_info()
    assert device_memory(torch.device("cuda")) == pytest.approx(total, rel=0.05)


def test_copies_for_a_background_save_are_pinned_and_do_not_follow_the_weights() -> None:
    saves = BackgroundSaves(pinned=True)
    weight = torch.arange(1 << 16, dtype=torch.float32, device="cuda")
    copy = saves.copy({"w": weight})["w"]
    weight.zero_()
    torch.cuda.synchronize()
    assert copy.device.type == "cpu"
    assert copy.is_pinned()
    assert torch.equal(copy, torch.arange(1 << 16, dtype=torch.float32))
    saves.close()


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


def _fit(folder: Path, module: L.LightningModule, devices: int, **options: Any) -> None:
    folder.mkdir()
    trainer = L.Trainer(
        accelerator="gpu",
        devices=devices,
        strategy=FSDP2(start_method="popen" if devices == 1 else "spawn", timeout=120, **options),
        max_steps=2,
        max_epochs=-1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[RLCheckpoint(folder / "ck", every_n_train_steps=1, save_top_k=-1)],
    )
    trainer.fit(module, datamodule=data_of(module, folder, devices))


def _weights(folder: Path, step: int) -> dict[str, Tensor]:
    state: dict[str, Tensor] = read_folder(folder / "ck" / f"step={step:06d}.ckpt", lazy=False)[
        "state_dict"
    ]
    return state


def _rloo(model_folder: str) -> RLOO:
    module = MODULES["rloo"](Path(model_folder))
    assert isinstance(module, RLOO)
    return module


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=TWO_GPUS)])
def test_checkpoints_of_the_background_hold_what_others_hold(
    devices: int, model_folder: str, tmp_path: Path
) -> None:
    for name, later in (("now", False), ("later", True)):
        _fit(tmp_path / name, _rloo(model_folder), devices, async_save=later)
    for step in (1, 2):
        later_one = _weights(tmp_path / "later", step)
        for name, weight in _weights(tmp_path / "now", step).items():
            torch.testing.assert_close(later_one[name], weight, rtol=1e-4, atol=1e-6)


@TWO_GPUS
@pytest.mark.parametrize("options", [{}, {"shard_group": 1}, {"cpu_offload": True}])
def test_gradients_in_parts_take_the_same_step_as_whole_ones(
    options: dict[str, Any], model_folder: str, tmp_path: Path
) -> None:
    for name, each in (("parts", True), ("whole", False)):
        _fit(tmp_path / name, _rloo(model_folder), 2, reduce_each_micro_batch=each, **options)
    parts = _weights(tmp_path / "parts", 1)
    for name, weight in _weights(tmp_path / "whole", 1).items():
        torch.testing.assert_close(parts[name], weight, rtol=1e-3, atol=2e-5)
