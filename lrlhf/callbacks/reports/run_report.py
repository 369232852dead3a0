"""The last words of a run: what it reached, and where everything is."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lrlhf.callbacks.eval_jsonl import EvalJSONL, covers_validation_set
from lrlhf.callbacks.hf_export import HFExport
from lrlhf.callbacks.kl_control import KLControl
from lrlhf.callbacks.output_files import hold_output_folder, output_folder
from lrlhf.callbacks.reports.panels import draw_panels
from lrlhf.callbacks.reports.plots import can_draw
from lrlhf.callbacks.reports.reward_curve import Curve, draw_curve
from lrlhf.callbacks.rollout_log import RolloutLog


class RunReport(L.Callback):
    """Draws ``reward_curve.png`` and prints where the results are, when ``fit`` ends.

    Drawing needs matplotlib (``pip install 'lrlhf[plots]'``); without it there are no pictures.
    It compares the evaluations at the start and at the end; with ``num_sanity_val_steps: -1`` the
    first is that of the model before training.

    Args:
        dirpath: Folder of the picture; None: the logger's, else the trainer's root.
        metric: Logged training metric to draw.
        eval_metric: Logged validation metric to draw and to compare.
        panels: Further metrics, each a panel of ``curves.png``; with adaptive `KLControl` its
            target is in the panel of ``kl/sequence``. None: no such picture.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        metric: str = "rollout/score",
        eval_metric: str = "eval/score",
        panels: list[str] | None = None,
    ) -> None:
        self.dirpath = dirpath
        self.panels = [Curve(name, [], []) for name in panels or []]
        self.metric = Curve(metric, [], [])
        self.evaluation = Curve(eval_metric, [], [])

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        hold_output_folder(trainer, self.dirpath, stage)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        _record(self.metric, trainer)
        for curve in self.panels:
            if not curve.name.startswith("eval/"):
                _record(curve, trainer)

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if covers_validation_set(trainer):
            self._record_evaluation(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._record_evaluation(trainer)

    def _record_evaluation(self, trainer: L.Trainer) -> None:
        _record(self.evaluation, trainer)
        for curve in self.panels:
            if curve.name.startswith("eval/"):
                _record(curve, trainer)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        places = _places(trainer)
        if self.metric.finite().steps and can_draw():
            path = output_folder(trainer, self.dirpath) / "reward_curve.png"
            draw_curve(path, self.metric, self.evaluation)
            places["reward curve"] = path
        if any(curve.finite().steps for curve in self.panels) and can_draw():
            path = output_folder(trainer, self.dirpath) / "curves.png"
            draw_panels(path, {"run": self.panels}, targets=_targets(trainer))
            places["curves"] = path
        pl_module.print(_text(self._summary(trainer), places))

    def state_dict(self) -> dict[str, Any]:
        named = {"metric": self.metric, "evaluation": self.evaluation}
        named |= {f"panel {curve.name}": curve for curve in self.panels}
        return {
            name: {"steps": list(curve.steps), "values": list(curve.values)}
            for name, curve in named.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.metric = Curve(self.metric.name, **_copied(state_dict["metric"]))
        self.evaluation = Curve(self.evaluation.name, **_copied(state_dict["evaluation"]))
        # a panel that was asked for after the run began has no past
        self.panels = [
            Curve(curve.name, **_copied(state_dict[f"panel {curve.name}"]))
            if f"panel {curve.name}" in state_dict
            else curve
            for curve in self.panels
        ]

    def _summary(self, trainer: L.Trainer) -> list[str]:
        return [_change(self.metric, trainer), _change(self.evaluation, trainer)]


def _copied(curve: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: list(values) for name, values in curve.items()}


def _record(curve: Curve, trainer: L.Trainer) -> None:
    value = trainer.callback_metrics.get(curve.name)
    if value is None:
        return
    step = trainer.global_step
    if curve.steps and curve.steps[-1] == step:
        # an accumulated batch, or a second evaluation of the same weights
        curve.values[-1] = float(value)
        return
    curve.steps.append(step)
    curve.values.append(float(value))


def _change(curve: Curve, trainer: L.Trainer) -> str:
    finite = curve.finite()
    if not finite.steps:
        logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
        return f"{curve.name}: never logged (logged: {logged})"
    first, last = finite.values[0], finite.values[-1]
    if len(finite.steps) == 1:
        return f"{curve.name}: {last:.4g} at step {finite.steps[-1]}"
    return (
        f"{curve.name}: {first:.4g} at step {finite.steps[0]} → {last:.4g} at step "
        f"{finite.steps[-1]} ({last - first:+.4g})"
    )


def _targets(trainer: L.Trainer) -> dict[str, float]:
    """Values that a controller of the run holds, by metric."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    controls = [callback for callback in callbacks if isinstance(callback, KLControl)]
    adaptive = [control.target for control in controls if control.mode == "adaptive"]
    return {"kl/sequence": adaptive[0]} if adaptive else {}


def _places(trainer: L.Trainer) -> dict[str, Path]:
    """What the run has left on disk, by what it is."""
    places: dict[str, Path] = {}
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            places["metrics (CSV)"] = Path(logger.log_dir) / "metrics.csv"
        elif isinstance(logger, TensorBoardLogger):
            places["metrics (TensorBoard)"] = Path(logger.log_dir)
        elif isinstance(logger, WandbLogger):
            places["metrics (W&B)"] = Path(logger.experiment.dir).parent
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RolloutLog) and callback.path is not None:
            places["rollouts"] = callback.path
        elif isinstance(callback, EvalJSONL) and callback.paths:
            places["evaluations"] = callback.paths[-1]
        elif isinstance(callback, HFExport) and callback.last_export is not None:
            places["exported model"] = callback.last_export
        elif isinstance(callback, ModelCheckpoint):
            places |= _checkpoints(callback)
    return places


def _checkpoints(callback: ModelCheckpoint) -> dict[str, Path]:
    paths = {"checkpoint to resume": callback.last_model_path}
    if callback.monitor is not None:
        paths[f"checkpoint with best {callback.monitor}"] = callback.best_model_path
    elif not callback.last_model_path:
        paths["checkpoint to resume"] = callback.best_model_path
    return {name: Path(path) for name, path in paths.items() if path}


def _text(summary: list[str], places: dict[str, Path]) -> str:
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ignore")
    for name, path in places.items():
        table.add_row(Text(name), Text(str(path)))
    buffer = io.StringIO()
    # as wide as the longest path: a broken path cannot be copied
    Console(file=buffer, width=4096, color_system=None).print(table)
    lines = [line.rstrip() for line in buffer.getvalue().splitlines()]
    return "\n".join([*summary, *(line for line in lines if line)])
