"""FSDP2 and ZeRO on one to eight GPUs end where one process on a CPU does, and resume."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.runs import ROOT, environment
from tests.distributed.strategy_runs import STRATEGIES, run
from tests.distributed.test_strategies import assert_close, ends
from tests.forked import Popen

MODULES = ["reward", "rloo", "ppo", "ppo with its own critic", "rloo with lora"]


def on_ranks(
    name: str,
    strategy: str,
    accelerator: str,
    devices: int,
    model: str,
    folder: Path,
    *,
    resumed: str = "",
    program: str = "tests.gpu.ranks",
) -> list[dict[str, Any]]:
    arguments = [name, strategy, accelerator, str(devices), model, str(folder), resumed]
    process = Popen([sys.executable, "-m", program, *arguments], cwd=ROOT, env=environment())
    assert process.wait(timeout=500) == 0
    files = [folder / f"rank{rank}.pt" for rank in range(devices)]
    return [torch.load(file, map_location="cpu") for file in files]


@pytest.fixture
def counts(accelerator: str) -> list[int]:
    """Numbers of processes that there are GPUs for."""
    if accelerator == "cpu":
        return [2]
    return [count for count in (1, 2, 4, 8) if count <= torch.cuda.device_count()]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.gpu_lines(
    "lrlhf.strategies.fsdp",
    "lrlhf.strategies.deepspeed",
    "lrlhf.run.checkpoints.sharded_checkpoint",
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODULES)
def test_ranks_end_where_one_process_does_and_resume(
    name: str, strategy: str, counts: list[int], accelerator: str, model_folder: str, tmp_path: Path
) -> None:
    run(name, Path(model_folder), tmp_path / "alone")
    one = ends(tmp_path / "alone")
    for devices in counts:
        folder = tmp_path / f"{devices}"
        arguments = (name, strategy, accelerator, devices, model_folder)
        ranks = on_ranks(*arguments, folder / "whole")
        assert_close(ranks, one)
        resumed = str(folder / "whole")
        again = on_ranks(*arguments, folder / "again", resumed=resumed)
        for before, after in zip(ranks, again, strict=True):
            for part, value in before["weights"].items():
                torch.testing.assert_close(after["weights"][part], value, rtol=1e-4, atol=1e-6)
