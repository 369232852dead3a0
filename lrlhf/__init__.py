"""Reward models, PPO and RLOO from human feedback, as PyTorch Lightning modules."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lrlhf.lazy_torchmetrics import load_torchmetrics_piecemeal

if TYPE_CHECKING:
    from lrlhf.trainer import Trainer

__all__ = ["Trainer"]

load_torchmetrics_piecemeal()  # before Lightning is imported


def __getattr__(name: str) -> Any:
    # on demand: it takes seconds to import, and `lrlhf --help` needs none of it
    if name == "Trainer":
        return import_module("lrlhf.trainer").Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
