"""Progress of a run whose steps take long: which phase, and what came out."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar

from lrlhf.arguments import KeepsArguments
from lrlhf.rollout.listener import RolloutListener
from lrlhf.run.lightning_internals import shows_training

_SHOWN = {
    "rollout/score": "score",
    "rollout/response_length": "length",
    "kl/reference": "kl",
    "reward_model/accuracy": "accuracy",
    "train/loss": "loss",
}
"""Logged keys that are shown, and the short names they get."""


class PhaseProgress(KeepsArguments, TQDMProgressBar, RolloutListener):
    """A progress bar that shows the phase of the iteration and the metrics that matter.

    Where the output is no terminal (a log file, CI), it prints one plain line per step instead:
    ``step 12/60  score 0.53  kl 0.01  4.1 s/step (generate 2.1 reward 0.0 update 1.9)``.

    Args:
        refresh_rate: Steps between two updates of the bar, or between two lines.
        metrics: Logged keys to show, with the short names they get; None: score, length, KL,
            accuracy and loss, as far as they are logged.
        plain: Print lines (True) or draw a bar (False); None: a bar on a terminal only.
    """

    def __init__(
        self,
        refresh_rate: int = 1,
        metrics: dict[str, str] | None = None,
        plain: bool | None = None,
    ) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self.metrics = dict(_SHOWN if metrics is None else metrics)
        self.plain = not sys.stdout.isatty() if plain is None else plain
        self._prints = self.plain and refresh_rate > 0
        self._seconds: dict[str, float] = {}
        self._phase = ""
        self._phase_start = 0.0
        self._step_start = 0.0
        self._printed_step = 0
        if self.plain:
            super().disable()

    def disable(self) -> None:
        """Show nothing: what Lightning asks of the ranks other than zero."""
        self._prints = False
        super().disable()

    def enable(self) -> None:
        self._prints = self.plain
        if not self.plain:
            super().enable()

    def get_metrics(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        logged = super().get_metrics(trainer, pl_module)
        known = {*self.metrics, "v_num"}
        rest = {name: value for name, value in logged.items() if name not in known}
        return {**self._shown(trainer), **rest}

    def on_phase(self, phase: str) -> None:
        now = time.monotonic()
        if self._phase:
            before = self._seconds.get(self._phase, 0.0)
            self._seconds[self._phase] = before + now - self._phase_start
        self._phase, self._phase_start = phase, now
        if self.is_enabled and phase and shows_training(self):
            epoch = self.trainer.current_epoch
            self.train_progress_bar.set_description(f"Epoch {epoch} [{phase}]", refresh=True)

    def on_train_batch_start(self, *_: Any) -> None:
        self._seconds = {}
        self._step_start = time.monotonic()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        step, total = trainer.global_step, trainer.estimated_stepping_batches
        due = self._prints and (step % self.refresh_rate == 0 or step == total)
        # a batch that only accumulated gradients has no line
        if not due or step == self._printed_step:
            return
        self._printed_step = step
        words = [f"step {step}" if math.isinf(total) else f"step {step}/{int(total)}"]
        words += [f"{label} {value}" for label, value in self._shown(trainer).items()]
        pace = f"{time.monotonic() - self._step_start:.1f} s/step"
        phases = " ".join(f"{name} {seconds:.1f}" for name, seconds in self._seconds.items())
        _say([*words, f"{pace} ({phases})" if phases else pace])

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        metrics = [
            f"{name.removeprefix('eval/')} {float(value):.4g}"
            for name, value in trainer.callback_metrics.items()
            if name.startswith("eval/")
        ]
        if self._prints:
            _say([f"eval at step {trainer.global_step}", *metrics])

    def _shown(self, trainer: L.Trainer) -> dict[str, str]:
        logged = trainer.callback_metrics
        return {
            label: f"{float(logged[key]):.3g}"
            for key, label in self.metrics.items()
            if key in logged
        }


def _say(words: list[str]) -> None:
    sys.stdout.write(f"{'  '.join(words)}\n")
    sys.stdout.flush()  # a log that is read while it grows
