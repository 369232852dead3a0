"""Progress of a run whose steps take long: which phase, and what came out."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lrlhf.arguments import KeepsArguments
from lrlhf.callbacks.eval_jsonl import is_evaluation
from lrlhf.modules.contracts import Exportable, Measured, SamplesResponses
from lrlhf.modules.metrics.measurement import HasMeasurements
from lrlhf.rollout.listener import RolloutListener
from lrlhf.run.lightning_internals import shows_training, step_values
from lrlhf.run.seeding import model_step

_OF_POLICIES = {
    "rollout/score": "score",
    "rollout/response_length": "length",
    "kl/reference": "kl",
    "teacher/reverse_kl": "to teacher",
    "policy/entropy": "entropy",
}
_OF_OTHERS = {
    "train/loss": "loss",
    "reward_model/accuracy": "accuracy",
    "reward_model/margin": "margin",
    "rewards/accuracy": "accuracy",
    "rewards/margin": "margin",
    "train/accuracy": "accuracy",
    "train/token_accuracy": "token accuracy",
}
"""Logged keys that are shown, and the short names they get."""
_EVALUATED = {"response_length": "length"}
"""Short names of what an evaluation measures."""
_CUT_OFF = "truncated_fraction"
_GAP = "  "
_ENDS = ("_low", "_high")
"""Of the names of an interval."""
_MAX_WIDTH = 119
"""Of a line about an evaluation, in characters, without the mark for what is left out."""
_NOTHING = 1e-6
"""What is smaller is the rounding error of a zero."""


class PhaseProgress(KeepsArguments, TQDMProgressBar, RolloutListener):
    """A progress bar that shows the phase of the iteration and the metrics that matter.

    Before training it says what is trained, and above the bar there is a line for each evaluation.
    Where the output is no terminal (a log file, CI), it prints one plain line per step instead:
    ``step 12/60  score 0.53  4.1 s/step (generate 2.1 reward 0.0 update 1.9)  3 min left``.

    Args:
        refresh_rate: Steps between two updates of the bar, or between two lines.
        metrics: Logged keys to show, with the short names they get; None: score, length, KL and
            entropy of a policy, loss, accuracy and margin of any other module, as far as they are
            logged.
        plain: Print lines (True) or draw a bar (False); None: a bar on a terminal only.
    """

    def __init__(
        self,
        refresh_rate: int = 1,
        metrics: dict[str, str] | None = None,
        plain: bool | None = None,
    ) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self.metrics = metrics
        self.plain = not sys.stdout.isatty() if plain is None else plain
        self._reports = refresh_rate > 0
        self._prints = self.plain and self._reports
        self._seconds: dict[str, float] = {}
        self._phase = ""
        self._phase_start = 0.0
        self._step_start = 0.0
        self._printed_step = 0
        self._start: tuple[float, int] | None = None
        self._earlier: Mapping[str, Any] = {}
        if self.plain:
            super().disable()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        shows = self._reports and trainer.is_global_zero
        if stage == "fit" and shows and isinstance(pl_module, Exportable):
            for role, model in pl_module.trainable_models().items():
                _say([f"{role}: {_described(model)}"])

    def disable(self) -> None:
        """Show nothing: what Lightning asks of the ranks other than zero."""
        self._reports = self._prints = False
        super().disable()

    def enable(self) -> None:
        self._reports, self._prints = True, self.plain
        if not self.plain:
            super().enable()

    def get_metrics(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        logged = super().get_metrics(trainer, pl_module)
        # the loss of a policy is no measure of how good it is
        known = {*_OF_POLICIES, *_OF_OTHERS, *(self.metrics or ()), "v_num"}
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

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._seconds = {}
        self._step_start = time.monotonic()
        if self._start is None:
            self._start = (self._step_start, trainer.global_step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._start = None

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
        words += [f"{label} {value}" for label, value in self._shown(trainer, fresh=True).items()]
        now = time.monotonic()
        pace = f"{now - self._step_start:.1f} s/step"
        phases = " ".join(f"{name} {seconds:.1f}" for name, seconds in self._seconds.items())
        words.append(f"{pace} ({phases})" if phases else pace)
        assert self._start is not None
        begun, first = self._start
        if step > first and step < total < math.inf:
            words.append(f"{_duration((now - begun) / (step - first) * (total - step))} left")
        _say(words)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        # `lrlhf validate` ends with a table of its own
        next_to_bar = self._reports and trainer.state.fn == TrainerFn.FITTING
        if self._prints or next_to_bar:
            step = model_step(trainer)
            title = f"eval at step {step}"
            if trainer.sanity_checking and not is_evaluation(trainer):
                # of a few batches, so no number to compare others with
                title = f"sanity check on {int(sum(trainer.num_sanity_val_batches))} batches"
            elif trainer.sanity_checking and step == 0:
                title += " (before training)"
            first = pl_module.eval_metric if isinstance(pl_module, Measured) else ""
            words = _evaluated(trainer.callback_metrics, first, _responses(pl_module))
            self._tell([title, *words])

    def _tell(self, words: list[str]) -> None:
        """Write a line that fits, above the bar where there is one."""
        if self.plain:
            _say(_fitting(words, _MAX_WIDTH))
            return
        columns = shutil.get_terminal_size().columns
        # the bar's own way: it is drawn again below the line, whichever of its bars is there
        self.val_progress_bar.write(_GAP.join(_fitting(words, min(_MAX_WIDTH, columns - 1))))

    def _shown(self, trainer: L.Trainer, *, fresh: bool = False) -> dict[str, str]:
        """Return what was logged last; ``fresh``: without what an earlier line had."""
        logged, names = trainer.callback_metrics, self.metrics
        if names is None:
            names = _OF_POLICIES if _OF_POLICIES.keys() & logged.keys() else _OF_OTHERS
        shown = {key: label for key, label in names.items() if key in logged}
        if fresh:
            earlier, self._earlier = self._earlier, step_values(trainer)
            old = {
                k for k, value in self._earlier.items() if value is None or value is earlier.get(k)
            }
            shown = {key: label for key, label in shown.items() if key not in old}
        return {label: short(logged[key]) for key, label in shown.items()}


def _described(model: nn.Module) -> str:
    """Class, size and what of it is trained, before a strategy splits it."""
    sizes = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
    total, trained = sum(size for size, _ in sizes), sum(size for size, learns in sizes if learns)
    share = "all trained" if trained == total else f"{_counted(trained)} of them trained"
    return f"{type(model).__name__}, {_counted(total)} parameters, {share}"


def _counted(number: int) -> str:
    """Return a count as people say it: 134.5 M."""
    units = ((10**9, " B"), (10**6, " M"), (10**3, " K"))
    size, unit = next((entry for entry in units if number >= entry[0]), (1, ""))
    return f"{number / size:.1f}{unit}" if unit else str(number)


def short(value: Tensor | float) -> str:
    """Return a number in three digits; what is left of a zero is a zero."""
    number = float(value)
    return f"{0.0 if abs(number) < _NOTHING else number:.3g}"


def _duration(seconds: float) -> str:
    """Return a time as people say it: 40 s, 3 min, 2 h 05 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def _responses(module: L.LightningModule) -> dict[str, int]:
    """How many responses each metric of the last evaluation is about, where that is known."""
    if not (isinstance(module, HasMeasurements) and isinstance(module, SamplesResponses)):
        return {}
    if module.settings.evaluation.num_samples > 1:  # of which a greedy pass has one
        return {}
    return {measured.name: measured.number for measured in module.measurements}


def _evaluated(logged: Mapping[str, Tensor], first: str, responses: Mapping[str, int]) -> list[str]:
    """What an evaluation measured, each with its interval: ``first``, and the rest."""
    ends = {f"{name}{end}" for name in logged for end in _ENDS if _has_interval(name, logged)}
    names = [name for name in logged if name.startswith("eval/") and name not in ends]
    names.sort(key=lambda name: (name != first, not name.startswith(f"{first}_")))
    words = []
    for name in names:
        plain = name.removeprefix("eval/")
        if plain.endswith(_CUT_OFF):
            share, number = float(logged[name]), responses.get(name)
            counted = f"{round(share * number)} of {number}" if number else f"{share:.0%}"
            words.append(f"{plain.removesuffix(_CUT_OFF)}{counted} cut off")
            continue
        word = f"{_EVALUATED.get(plain, plain)} {short(logged[name])}"
        if _has_interval(name, logged):
            low, high = (short(logged[f"{name}{end}"]) for end in _ENDS)
            word += f" ({low} to {high})"
        words.append(word)
    return words


def _has_interval(name: str, logged: Mapping[str, Tensor]) -> bool:
    return all(f"{name}{end}" in logged for end in _ENDS)


def _fitting(words: list[str], width: int) -> list[str]:
    """Leave out the last words of a line that is too long; the loggers have them all."""
    ends = accumulate(len(word) + len(_GAP) for word in words)
    fitting = [word for word, end in zip(words, ends, strict=True) if end <= width]
    return words if len(fitting) == len(words) else [*fitting, "…"]


def _say(words: list[str]) -> None:
    sys.stdout.write(f"{_GAP.join(words)}\n")
    sys.stdout.flush()  # a log that is read while it grows
