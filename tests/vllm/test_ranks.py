"""Two processes with vLLM train as one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]


def trained(folder: Path, engine: str, ranks: int) -> list[tuple[dict[str, Tensor], dict]]:
    command = [sys.executable, "-m", "tests.vllm.two_ranks", str(folder), engine, str(ranks)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / "run" / f"rank{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    ((state, _),) = trained(tmp_path_factory.mktemp("alone"), "vllm", 1)
    return state


@pytest.mark.parametrize("engine", ["vllm", "vllm_server"])
def test_two_processes_train_as_one(engine: str, alone: dict[str, Tensor], tmp_path: Path) -> None:
    for state, metrics in trained(tmp_path, engine, 2):
        assert metrics["mismatch/max"] < 1e-4
        assert metrics["sync/age"] == 0
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6, msg=name)
