"""A policy that trains on any machine, slowly enough to be interrupted, for runs in processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lrlhf.modules.policy.iteration import Iteration
from lrlhf.run import Collectives, count_iterations_as_steps
from lrlhf.run.supervision.watch import watch_over


class CountingPolicy(L.LightningModule):
    """Its weight is the number of finished iterations: each has a rollout and an update.

    Args:
        folder: Each rank writes ``rank<rank>.pid`` and ``rank<rank>.phase`` there.
        seconds: How long each phase takes.
        stuck_at: Iteration in which rank 0 goes no further.
    """

    def __init__(self, folder: str, seconds: float = 0.1, stuck_at: int = -1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.policy.weight)
        self.folder = Path(folder)
        self.seconds = seconds
        self.stuck_at = stuck_at

    def setup(self, stage: str) -> None:
        if stage == "fit":
            count_iterations_as_steps(self.trainer)
            watch_over(self.trainer, grace_s=5.0)
            (self.folder / f"rank{self.global_rank}.pid").write_text(str(os.getpid()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        it = Iteration(self)  # type: ignore[arg-type]
        with it.phase("generate"):
            self._work("generate")
            if self.global_rank == 0 and self.global_step + 1 == self.stuck_at:
                self._work("stuck")
                time.sleep(10_000)
            Collectives(self.trainer).sum(torch.zeros(1))
        with it.phase("update"):
            self._work("update")
            optimizer = self.optimizers()
            self.manual_backward(-self.policy(torch.ones(1)).sum())
            optimizer.step()
            optimizer.zero_grad()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._work("validation")

    def _work(self, phase: str) -> None:
        mark = self.folder / f"rank{self.global_rank}.phase"
        temporary = mark.with_suffix(".tmp")
        temporary.write_text(f"{self.global_step + 1} {phase}")
        temporary.replace(mark)
        time.sleep(self.seconds)


class CountingData(L.LightningDataModule):
    """Batches of one number.

    Args:
        batches: For training.
        validation: For validation.
    """

    def __init__(self, batches: int = 10_000, validation: int = 0) -> None:
        super().__init__()
        self.batches = batches
        self.validation = validation

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.zeros(self.batches), batch_size=1)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.zeros(self.validation), batch_size=1)
