"""Reward models, PPO and RLOO from human feedback, as PyTorch Lightning modules."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lrlhf.lazy_exports import lazy_exports, load_torchmetrics_piecemeal

# on demand: it takes seconds to import, and `lrlhf --help` needs none of it
if TYPE_CHECKING:
    from lrlhf.trainer import Trainer
else:
    __getattr__ = lazy_exports(__name__)

__all__ = ["Trainer"]

load_torchmetrics_piecemeal()  # before Lightning is imported

# warns at its import on processors with AVX512-BF16, of a faster kernel that is not installed
_bitsandbytes = logging.getLogger("bitsandbytes.backends.cpu.ops")
if _bitsandbytes.level == logging.NOTSET:
    _bitsandbytes.setLevel(logging.ERROR)
