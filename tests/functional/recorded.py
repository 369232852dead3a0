"""Outputs of TRL 1.16.0 and LightRFT 0.1.1 (commit 49e62cb), recorded by calling their own code.

Each file names its source under ``source``. Records are compared in float32 to 1e-5 relative.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TRL: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "trl.json").read_text())
LIGHTRFT: dict[str, Any] = json.loads(
    (Path(__file__).parent / "golden" / "lightrft.json").read_text()
)


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def mask(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def assert_recorded(actual: Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual, tensor(expected), rtol=1e-5, atol=1e-6)
