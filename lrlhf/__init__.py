"""Reward models, PPO and RLOO from human feedback, as PyTorch Lightning modules."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lrlhf.lazy_torchmetrics import load_torchmetrics_piecemeal

if TYPE_CHECKING:
    from lrlhf.trainer import Trainer

__all__ = ["Trainer"]

load_torchmetrics_piecemeal()  # before Lightning is imported

# warns at its import on processors with AVX512-BF16, of a faster kernel that is not installed
_bitsandbytes = logging.getLogger("bitsandbytes.backends.cpu.ops")
if _bitsandbytes.level == logging.NOTSET:
    _bitsandbytes.setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    # on demand: it takes seconds to import, and `lrlhf --help` needs none of it
    if name == "Trainer":
        return import_module("lrlhf.trainer").Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
