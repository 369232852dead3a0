"""Weights that are read onto GPUs: parts on one and two, in main memory, and the room they need."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lrlhf.models import CausalLM, evaluating
from lrlhf.models.loading.deferred_weights import is_deferred, reading
from lrlhf.models.sharding import own_part, reshard, within
from lrlhf.rollout import TransformersEngine
from lrlhf.strategies import FSDP2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore"),
]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than 2 GPUs")


class Policy(L.LightningModule):
    """Compares its shards with a model that was loaded whole, on the rank that has them."""

    def __init__(self, source: str, *, cpu_offload: bool) -> None:
        super().__init__()
        self.source, self.cpu_offload = source, cpu_offload
        self.policy = CausalLM(source=source).load()
        assert is_deferred(self.policy)

    def trainable_models(self) -> dict[str, torch.nn.Module]:
        return {"policy": self.policy}

    def predict_step(self, batch: Tensor) -> float:
        with reading(later=False):
            whole = CausalLM(source=self.source).load()
        reshard(self.policy)
        expected = whole.state_dict()
        for name, weight in self.policy.named_parameters():
            assert isinstance(weight, DTensor)
            part = own_part(weight)
            assert part.device.type == ("cpu" if self.cpu_offload else "cuda"), name
            assert part.is_pinned() == (self.cpu_offload and part.numel() > 0), name
            [chunk] = weight.__create_chunk_list__()
            start, size = chunk.offsets[0], chunk.sizes[0]
            assert torch.equal(part.cpu(), expected[name][start : start + size]), name
        for name, buffer in self.policy.named_buffers():
            assert buffer.device.type == "cuda", name
            torch.testing.assert_close(buffer.cpu(), dict(whole.named_buffers())[name])
        with evaluating(self.policy):
            logits = within(self.policy, lambda: self.policy(input_ids=batch).logits)
        theirs = whole.to(self.device)(input_ids=batch).logits
        torch.testing.assert_close(logits, theirs, rtol=1e-3, atol=1e-3)
        return float(logits.mean())


@pytest.mark.gpu_lines("lrlhf.strategies.fsdp.FSDP2.shard")
@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=TWO)])
def test_each_gpu_gets_its_parts(
    devices: int, cpu_offload: bool, model_folder: str, tmp_path: Path
) -> None:
    strategy = FSDP2(cpu_offload=cpu_offload, start_method="spawn" if devices > 1 else "popen")
    trainer = L.Trainer(
        accelerator="gpu",
        devices=devices,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
        default_root_dir=tmp_path,
    )
    with reading(later=True):
        module = Policy(model_folder, cpu_offload=cpu_offload)
    tokens = DataLoader(torch.arange(4, 12)[None, None], batch_size=None)
    trainer.predict(module, tokens, return_predictions=False)


def test_a_policy_that_fills_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    del kept  # still reserved, and free for what is gathered
    free: Any = torch.cuda.mem_get_info()[0] + 2**28
    engine, tokenizer = TransformersEngine(), SimpleNamespace()
    module = "lrlhf.rollout.engines.transformers_engine.gathered_bytes"
    monkeypatch.setattr(module, lambda _: int(0.7 * free))
    engine.attach(torch.nn.Linear(1, 1).cuda(), tokenizer)  # type: ignore[arg-type]
    monkeypatch.setattr(module, lambda _: int(0.9 * free))
    with pytest.raises(ValueError, match="of the GPU are free: take engine: VLLMServerEngine"):
        engine.attach(torch.nn.Linear(1, 1).cuda(), tokenizer)  # type: ignore[arg-type]
