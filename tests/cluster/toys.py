"""What the runs on a cluster are scored by."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L

from lrlhf.rewards import completion_segments
from tests.modules.policy_runs import letters


def slow_letters(completions: Sequence[str], **_: Any) -> list[float]:
    """Long enough for a test to see what it interrupts."""
    time.sleep(0.4)
    return letters(completions)


def sampled_characters(completions: Sequence[str], **_: Any) -> list[float]:
    return [
        float(sum(len(part.text) for part in completion_segments(one) if part.sampled))
        for one in completions
    ]


class RefusedByRankZero(L.Callback):
    """Cannot be made by rank 0, for which the others then wait."""

    def __init__(self) -> None:
        if os.environ.get("RANK") == "0":
            raise ValueError("rank 0 refuses this")


class TellsDevice(L.Callback):
    """Writes the device of a trainer, the GPUs that it sees and ``OWN`` into the run folder."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        seen = [os.environ.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "OWN")]
        told = " ".join([str(pl_module.device), *seen])
        Path(trainer.default_root_dir, "device").write_text(told)
