"""Every overlay of configs/strategy trains on two processes, as its header says."""

import sys
from pathlib import Path

import pytest

from tests.distributed.runs import ROOT, environment
from tests.forked import run

pytestmark = pytest.mark.slow

OVERLAYS = sorted((ROOT / "configs" / "strategy").glob("*.yaml"))


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path.stem == "fsdp" else pytest.mark.exhaustive)
        for path in OVERLAYS
    ],
    ids=lambda path: path.stem,
)
def test_an_overlay_trains_on_two_processes(path: Path, model_folder: str, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "lrlhf", "fit"),
        f"--config={ROOT / 'configs' / 'quickstart.yaml'}",
        f"--config={path}",
        f"--model.policy={model_folder}",
        "--data.train.size=40",
        "--data.val_size=4",
        "--data.val_batch_size=2",
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
        "--trainer.precision=32-true",
        "--trainer.max_steps=2",
    ]
    done = run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "runs/quickstart/checkpoints/last.ckpt").exists()
    assert (tmp_path / "runs/quickstart/export/final/model.safetensors").is_file()
