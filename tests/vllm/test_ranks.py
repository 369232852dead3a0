"""Two processes with vLLM train as one, also where no rank has the whole policy."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def trained(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.vllm.two_ranks", str(folder), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(path) for path in sorted((folder / "run").glob("rank*.pt"))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (state,) = trained(tmp_path_factory.mktemp("alone"), "vllm")
    return state


@pytest.fixture(scope="module")
def adapted_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (state,) = trained(tmp_path_factory.mktemp("adapted"), "vllm", "lora")
    return state


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("engine", "strategy"),
    [
        ("vllm", "ddp"),
        ("vllm_server", "ddp"),
        ("vllm_server", "fsdp2"),
        ("vllm_replicas", "fsdp2"),
        ("vllm", "fsdp2"),
        ("vllm_server", "deepspeed_zero3"),
        ("vllm_shared", "ddp"),
        ("vllm_shared", "fsdp2"),
    ],
)
def test_two_processes_train_as_one(
    engine: str, strategy: str, alone: dict[str, Any], tmp_path: Path
) -> None:
    assert_equal(trained(tmp_path, engine, "whole", strategy), alone)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("engine", "strategy"),
    [("vllm_server", "fsdp2"), ("vllm", "deepspeed_zero3"), ("vllm_shared", "fsdp2")],
)
def test_two_processes_train_one_adapter(
    engine: str, strategy: str, adapted_alone: dict[str, Any], tmp_path: Path
) -> None:
    assert_equal(trained(tmp_path, engine, "lora", strategy), adapted_alone)


def assert_equal(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["metrics"]["mismatch/max"] < 1e-4
        assert rank["metrics"]["sync/age"] == 0
    found = {name: value for rank in ranks for name, value in rank["weights"].items()}
    assert found.keys() == alone["weights"].keys()
    for name, value in alone["weights"].items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)
