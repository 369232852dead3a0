"""Trainers and rollout replicas on the GPUs that Ray gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.apps.cluster.local_cluster import launching, weights, write_run
from tests.distributed.runs import ROOT, running
from tests.vllm.models import build_policy

pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore"),
]


def launched(config: Path, *flags: str, **trainer: Any) -> str:
    """Run with GPUs on a cluster that is started for it; returns the output."""
    content = yaml.safe_load(config.read_text())
    content["trainer"] |= {"accelerator": "gpu", "max_steps": 3, **trainer}
    config.write_text(yaml.safe_dump(content))
    flags = ("--cluster.trainers.workers=1", "--cluster.trainers.gpus=1", *flags)
    with running(launching(config, "null", *flags), ROOT) as process:
        output, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, output
    return output


@pytest.mark.gpu_lines("lrlhf.apps.cluster.launch")
def test_a_trainer_has_the_gpu_that_it_asks_for(model_folder: str, tmp_path: Path) -> None:
    config = write_run(tmp_path / "run", model_folder)
    callbacks = yaml.safe_load(config.read_text())["trainer"]["callbacks"]
    launched(config, callbacks=[*callbacks, {"class_path": "tests.apps.cluster.toys.TellsDevice"}])
    device, seen = (config.parent / "device").read_text().split()
    assert device == "cuda:0"
    assert seen.isdigit()  # one, whatever the machine has


@pytest.mark.vllm
@pytest.mark.gpu_lines("lrlhf.apps.cluster.replicas")
@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="takes three GPUs")
def test_replicas_get_weights_by_nccl(tokenizer: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    build_policy(tokenizer).save_pretrained(model)
    tokenizer.save_pretrained(model)
    engine = {"class_path": "VLLMServerEngine", "init_args": {"max_model_len": 64}}
    config = write_run(tmp_path / "run", str(model), engine=engine)
    content = yaml.safe_load(config.read_text())
    sync = {"class_path": "VLLMWeightSync"}
    output = launched(
        config,
        *("--cluster.rollouts.replicas=2", "--cluster.rollouts.gpus=1"),
        callbacks=[*content["trainer"]["callbacks"], sync],
    )
    assert "nccl" in output
    assert weights(config, 3).keys() == weights(config, 1).keys()
