"""A run of a few milliseconds that can be killed at any instant."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lrlhf import Trainer
from lrlhf.callbacks import RLCheckpoint
from lrlhf.run import count_iterations_as_steps, resume_where_it_stopped, use_atomic_checkpoints
from lrlhf.run.log_rows import keep_log_rows


class KilledError(Exception):
    """The run ends here, as if by a kill."""


class Toy(L.LightningModule):
    """Learns a number, and logs what it does; every metric is known from the step alone."""

    def __init__(self, *, automatic: bool = False, rare: int | None = None) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.rare = rare
        self.weight = nn.Parameter(torch.zeros(1))
        self.clock = 0.0

    def setup(self, stage: str) -> None:
        use_atomic_checkpoints(self.trainer)
        keep_log_rows(self.trainer, stage)
        if stage == "fit":
            resume_where_it_stopped(self.trainer)
        if stage == "fit" and not self.automatic_optimization:
            count_iterations_as_steps(self.trainer)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.weight], lr=0.1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        # not the batch: a plain loader begins its epoch anew when a run is resumed
        del batch
        loss = ((self.weight - math.sin(self.trainer.global_step)) ** 2).mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("train/loss", loss.detach(), batch_size=1)
        # as a clock does: other values in every process
        self.clock += float(torch.rand(()))
        self.log("perf/train_s", self.clock, batch_size=1)
        if self.rare is not None and self.trainer.global_step >= self.rare:
            self.log("a/rare", float(batch_idx), batch_size=1)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("eval/loss", (self.weight - batch.mean()).abs().mean(), batch_size=1)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test/loss", (self.weight - batch.mean()).abs().mean(), batch_size=1)

    def on_train_epoch_end(self) -> None:
        self.log("epoch/weight", float(self.weight.detach()))


class Killer(L.Callback):
    """Kills the run in one of its hooks, when so many steps are done."""

    def __init__(self, hook: str, step: int) -> None:
        self.step = step
        setattr(self, hook, self._kill)

    def _kill(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not trainer.sanity_checking:
            raise KilledError


class KilledAfterSaving(RLCheckpoint):
    """Kills the run when it has saved, before Lightning writes the row of the step."""

    def __init__(self, step: int, **options: Any) -> None:
        super().__init__(**options)
        self.step = step

    @property
    def state_key(self) -> str:
        # that of the class whose place it takes
        return super().state_key.replace("KilledAfterSaving", "RLCheckpoint")

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        if trainer.global_step == self.step:
            raise KilledError

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if trainer.global_step == self.step:
            raise KilledError


def train(
    folder: Path,
    loggers: Sequence[Logger],
    *callbacks: L.Callback,
    module: Toy | None = None,
    ckpt_path: str | None = "last",
    save: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Train ten steps: epochs of five, validation after 4 and 8, a checkpoint after each third."""
    saving = {"dirpath": folder / "checkpoints", "every_n_train_steps": 3} if save is None else save
    if not any(isinstance(callback, RLCheckpoint) for callback in callbacks):
        callbacks = (*callbacks, RLCheckpoint(**saving))
    torch.manual_seed(0)
    data = torch.randn(10, 4)
    defaults: dict[str, Any] = {"max_steps": 10, "max_epochs": -1, "log_every_n_steps": 1}
    defaults |= {"val_check_interval": 4, "check_val_every_n_epoch": None}
    defaults |= {"num_sanity_val_steps": 0}
    trainer = L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=list(loggers),
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **(defaults | options),
    )
    torch.seed()  # for what a clock would say
    found = (folder / "checkpoints").exists()
    trainer.fit(
        module or Toy(),
        DataLoader(data, batch_size=2),
        DataLoader(data, batch_size=10),
        ckpt_path=ckpt_path if found else None,
        weights_only=True,
    )


def run_stages(folder: Path, *loggers: Logger) -> None:
    """Validate, train two steps, validate, and train two more, all with one trainer."""
    trainer = Trainer(
        default_root_dir=folder,
        default_callbacks=False,
        accelerator="cpu",
        logger=list(loggers),
        max_epochs=1,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module, batches = Toy(automatic=True), DataLoader(torch.zeros(2, 4))
    module.save_hyperparameters({"lr": 0.1})
    for epochs in (1, 2):
        trainer.validate(module, batches, verbose=False)
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, batches)


def steps_of(rows: Iterable[Mapping[str, Any]], axis: str = "step") -> list[int]:
    """Steps of the training rows."""
    return [int(row[axis]) for row in rows if row.get("train/loss") not in (None, "")]
