"""A run whose phases hang where they are told to, and the options that decide it.

    python -m tests.strategies.hanging FOLDER PHASE HOW SECONDS

HOW: ``python`` sleeps where a signal reaches it, ``c`` waits in C for good, ``pause`` goes on
after half a second, ``never`` runs through.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lrlhf.callbacks import Deadlines
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.run import AtomicCheckpointIO, DeadlineError, count_iterations_as_steps
from lrlhf.run.supervision.watch import watch_over

TOLD = ("sync", "generate", "reward", "logprob", "update")


def hang_here(how: str) -> None:
    """Be found in a dump of the stacks by this name."""
    if how == "pause":
        time.sleep(0.5)
    if how == "python":
        time.sleep(10_000)
    if how == "c":
        # no signal ends the wait for a mutex, and Python's own lock is given away meanwhile
        mutex = ctypes.create_string_buffer(128)
        library = ctypes.CDLL(None)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)


class Hanging(L.LightningModule):
    """Hangs in the second of four steps, or where the phase is.

    Args:
        phase: Where.
        how: See the module.
        folder: Of the process ids.
    """

    def __init__(self, phase: str, how: str, folder: Path) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy = torch.nn.Linear(1, 1)
        self.phase, self.how, self.folder = phase, how, folder

    def _hang_in(self, phase: str) -> None:
        if phase == self.phase:
            (self.folder / "hangs").touch()
            hang_here(self.how)

    def setup(self, stage: str) -> None:
        count_iterations_as_steps(self.trainer)
        watch_over(self.trainer, poll_s=0.05)
        self._hang_in("setup")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        second = self.global_step == 1
        if second:
            self._hang_in("train")
        it = Iteration(self)  # type: ignore[arg-type]
        for phase in TOLD:
            with it.phase(phase):
                if second:
                    self._hang_in(phase)
        optimizer: Any = self.optimizers()
        optimizer.step()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._hang_in("validation")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._hang_in("save")

    def on_train_end(self) -> None:
        self._hang_in("end")


class Saves(L.Callback):
    """Saves after the second step."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Hanging, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(pl_module.folder / "saved.ckpt")


class SlowReading(AtomicCheckpointIO):
    """Hangs when it reads, if the module says so."""

    module: Hanging

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.module._hang_in("load")
        return super().load_checkpoint(*args, **kwargs)


class Rows(Dataset[Tensor]):
    """Four rows, of which the second may never come."""

    def __init__(self, module: Hanging) -> None:
        self._module = module

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        if index == 1:
            self._module._hang_in("data")
        return torch.tensor([float(index)])


def fit(module: Hanging, *callbacks: L.Callback, ckpt_path: Path | None = None) -> None:
    reading = SlowReading()
    reading.module = module
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=2,
        default_root_dir=module.folder,
        callbacks=[*callbacks, Saves()],
        plugins=[reading],
    )
    loaders = DataLoader(Rows(module)), DataLoader(torch.zeros(1))
    trainer.fit(module, *loaders, ckpt_path=ckpt_path, weights_only=True)


def run(folder: Path, phase: str, how: str, seconds: float = 1.5) -> Hanging:
    """Train for four steps, with a deadline of so many seconds on one phase."""
    module = Hanging(phase, how, folder)
    limits: dict[str, Any] = {"grace": 2.0, phase: seconds}
    path = None
    if phase == "load":
        fit(Hanging("none", "never", folder))
        path = folder / "saved.ckpt"
    fit(module, Deadlines(**limits), ckpt_path=path)
    return module


def main(arguments: list[str]) -> int:
    folder, phase, how = Path(arguments[0]), arguments[1], arguments[2]
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    (folder / "pids").write_text(f"{os.getpid()} {child.pid}")
    try:
        run(folder, phase, how, float(arguments[3]))
    except DeadlineError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    finally:
        child.kill()
    sys.stdout.write("done\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
