"""Random numbers as a function of (run seed, rank, step, sample), never of call order.

A run that resumes needs no generator state, and a validation pass in between changes nothing.
"""

from __future__ import annotations

import math
import os
import random
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn


def run_seed(seed: int | None) -> int:
    """Seed of the run: the given one, else that of ``seed_everything``, else 0."""
    return seed if seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))


def seed_everything_for(seed: int, *where: int) -> None:
    """Seed torch, NumPy and Python for coordinates such as step and rank, each with its stream."""
    words = np.random.SeedSequence([seed, *where]).generate_state(3)
    # else torch notes where it was called, for each kind of accelerator that it knows
    seed_all = (
        torch.manual_seed
        if torch.accelerator.is_available()
        else torch.default_generator.manual_seed
    )
    seed_all(int(words[0]))
    np.random.seed(int(words[1]))
    random.seed(int(words[2]))


def sample_seeds(seed: int, *where: int, count: int) -> list[int]:
    """Return ``count`` seeds of 32 bits, one per response to the prompt at ``where``."""
    return [int(word) for word in np.random.SeedSequence([seed, *where]).generate_state(count)]


def running_step(trainer: L.Trainer) -> int:
    """Return the number of the step that is running; the first one is 1.

    A step is an iteration of a policy, an optimizer step of a reward model. Its number is how many
    steps are finished when it is: what ``trainer.global_step`` is from its end on. The same number
    is on the row of the step in every log, in the records of its responses, in the names of their
    stored tensors and of a dump, on its line and its table in the terminal, on the axis of the
    curves, and on the checkpoint, the export and the evaluation that follow it. An evaluation
    before training is of step 0.

    Seeds are made of the number of steps before, and weights have that number as their version:
    the policy answers in step ``k`` with version ``k - 1``.
    """
    return trainer.global_step + 1


def model_step(trainer: L.Trainer) -> int:
    """Return how many steps are behind the model, trained here or loaded for an evaluation."""
    if trainer.state.fn != TrainerFn.FITTING:
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        loaded = [
            callback.loaded_step for callback in callbacks if isinstance(callback, LoadedStep)
        ]
        known = [step for step in loaded if step is not None]
        if known:
            return known[0]
    return trainer.global_step


def last_step(trainer: L.Trainer) -> int | None:
    """Return the number of a training's last step; None: it has no end, or nothing is trained."""
    if trainer.state.fn != TrainerFn.FITTING:
        return None
    steps = trainer.estimated_stepping_batches
    return int(steps) if math.isfinite(steps) else None


def is_last_step(trainer: L.Trainer) -> bool:
    """Tell whether a run has all its steps behind it: only a validation and the end are left."""
    if 0 <= trainer.max_steps <= trainer.global_step:
        return True
    epochs = trainer.max_epochs
    return bool(epochs and trainer.is_last_batch and 0 < epochs <= trainer.current_epoch + 1)


class LoadedStep(L.Callback):
    """Remembers the step of a checkpoint that was loaded for an evaluation.

    Outside of ``fit`` the trainer leaves its own counter as it is.
    """

    loaded_step: int | None = None
    """None: none was loaded since the last ``fit``."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.loaded_step = None

    # a strategy may load the checkpoint after the start of the fit
    on_train_start = on_fit_start

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.loaded_step = int(checkpoint["global_step"])
