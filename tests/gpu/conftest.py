"""What runs on one GPU or several; ``make gpu`` runs all of it.

Without a GPU every test here is skipped. ``LRLHF_GPU_STAND_IN=1`` runs those that ask for
``accelerator`` or ``device`` on the CPU instead: that shows that the tests themselves are right.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.vllm.models import build_policy

FOLDER = Path(__file__).parent
STANDS_IN = bool(os.environ.get("LRLHF_GPU_STAND_IN")) and not torch.cuda.is_available()

# cuBLAS reads it once, at its first product in a process
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="no GPU")
    for item in items:
        if FOLDER not in Path(item.path).parents:
            continue
        item.add_marker(pytest.mark.gpu)
        asks = {"accelerator", "device"} & set(getattr(item, "fixturenames", ()))
        if not torch.cuda.is_available() and not (STANDS_IN and asks):
            item.add_marker(missing)


@pytest.fixture
def accelerator() -> str:
    """The trainer's option."""
    return "cpu" if STANDS_IN else "gpu"


@pytest.fixture
def device() -> torch.device:
    """Where tensors go."""
    return torch.device("cpu" if STANDS_IN else "cuda")


@pytest.fixture
def two_gpus() -> None:
    """Skip a test that needs two."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs 2 GPUs, found {count}")


@pytest.fixture
def policy(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A tiny one that vLLM loads too."""
    return build_policy(tokenizer).to("cuda:0")
