"""The last words of a run: what it reached, and where everything is."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_warn

from lrlhf.arguments import KeepsArguments
from lrlhf.callbacks.eval_jsonl import EvalJSONL, is_evaluation
from lrlhf.callbacks.hf_export import HFExport
from lrlhf.callbacks.kl_control import KLControl
from lrlhf.callbacks.output_files import hold_output_folder, output_folder
from lrlhf.callbacks.reports.curves import Curve, draw_panels
from lrlhf.callbacks.rollout_log import RolloutLog
from lrlhf.modules.contracts import Measured, SamplesResponses
from lrlhf.run.run_folder import HasRunFolder, run_folder
from lrlhf.secrets import escaped

_EXPORTED, _RESUMED = "trained model", "last checkpoint"


class RunReport(KeepsArguments, L.Callback):
    """Draws ``reward_curve.png`` and prints where the results are, when ``fit`` ends.

    Drawing needs matplotlib (``pip install 'lrlhf[plots]'``); without it there is no picture.
    It compares the evaluations at the start and at the end; with ``num_sanity_val_steps: -1`` the
    first is that of the model before training.

    Args:
        dirpath: Folder of the picture; None: the run folder.
        metric: Logged training metric to draw; None: the one that the module names.
        eval_metric: Logged validation metric to draw and to compare; None: the module's.
        panels: Further metrics, each a panel beside those two; with adaptive `KLControl` its
            target is in the panel of ``kl/sequence``.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        metric: str | None = None,
        eval_metric: str | None = None,
        panels: list[str] | None = None,
    ) -> None:
        self.dirpath = dirpath
        self.metric = metric or ""
        self.eval_metric = eval_metric or ""
        self.panels = panels or []
        self.curves: dict[str, Curve] = {}
        """What has been logged so far, by metric."""
        self._trained = self._evaluated = False
        """Whether this process has taken a step, or evaluated the model."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        training, evaluation = "rollout/score", "eval/score"
        if isinstance(pl_module, Measured):
            training, evaluation = pl_module.train_metric, pl_module.eval_metric
        self.metric = self.metric or training
        self.eval_metric = self.eval_metric or evaluation
        for name in (self.metric, self.eval_metric, *self.panels):
            self.curves.setdefault(name, Curve(name, [], []))
        hold_output_folder(trainer, self.dirpath, stage)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._trained = True
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set outside its class
        if isinstance(trainer, HasRunFolder) and trainer.global_step % max(1, every):
            return  # what is there may be of a step before, which a resumed run does not know
        names = (name for name in self.curves if not self._is_evaluated(name))
        self._record(trainer, {self.metric, *names})

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if is_evaluation(trainer):
            self._evaluated = True
            self._record(trainer, filter(self._is_evaluated, self.curves))

    def _record(self, trainer: L.Trainer, names: Iterable[str]) -> None:
        for name in names:
            if (value := trainer.callback_metrics.get(name)) is not None:
                self.curves[name].record(trainer.global_step, float(value))

    def _is_evaluated(self, name: str) -> bool:
        return name == self.eval_metric or name.startswith("eval/")

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        folders = _places(trainer)
        try:
            folders |= self._draw(trainer)
        except ImportError as error:
            rank_zero_warn(f"there is no picture of the curves: {error}")
        lines = self._reached(trainer)
        lines += _listed({name: short_path(path) for name, path in folders.items()})
        if commands := _commands(trainer, folders):
            lines += ["next:", *_listed(commands)]
        # not the module's, which asks the progress bar: a bar that has ended prints nothing
        trainer.print(escaped("\n".join(["", *lines])))

    def _reached(self, trainer: L.Trainer) -> list[str]:
        """A line for each metric, and one that says so where nothing was done."""
        shown = [self.metric, self.eval_metric] if any(trainer.num_val_batches) else [self.metric]
        curves = [self.curves[name] for name in shown]
        if not self._trained:
            known = [_change(curve) for curve in curves if curve.finite().steps]
            return [f"no step was left: the run is at step {trainer.global_step}", *known]
        lines = []
        for curve in curves:
            if curve.finite().steps:
                lines.append(_change(curve))
            elif curve.name == self.eval_metric and not self._evaluated:
                every = _evaluation_interval(trainer)
                lines.append(f"{curve.name}: no evaluation in these steps (one each {every})")
            else:
                lines.append(f"{curve.name}: {_why_missing(curve.name, trainer)}")
        return lines

    def state_dict(self) -> dict[str, Any]:
        return {
            name: {"steps": list(curve.steps), "values": list(curve.values)}
            for name, curve in self.curves.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # a panel that was asked for after the run began has no past
        for name in self.curves.keys() & state_dict.keys():
            past = state_dict[name]
            self.curves[name] = Curve(name, list(past["steps"]), list(past["values"]))

    def _draw(self, trainer: L.Trainer) -> dict[str, Path]:
        names = dict.fromkeys((self.metric, self.eval_metric, *self.panels))
        curves = [self.curves[name] for name in names]
        if not any(curve.finite().steps for curve in curves):
            return {}
        path = output_folder(trainer, self.dirpath) / "reward_curve.png"
        draw_panels(path, {"run": curves}, targets=_targets(trainer))
        return {"reward curve": path}


def _listed(entries: Mapping[str, str]) -> list[str]:
    width = max(map(len, entries), default=0)
    return [f"  {name:{width}}   {entry}" for name, entry in entries.items()]


def short_path(path: Path) -> str:
    """Return a path as one types it in the working folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if here in path.parents else path)


def _commands(trainer: L.Trainer, folders: Mapping[str, Path]) -> dict[str, str]:
    """What one may type next, as far as the files for it are there."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    saved = [callback for callback in callbacks if isinstance(callback, SaveConfigCallback)]
    configs = [run_folder(trainer) / callback.config_filename for callback in saved]
    commands: dict[str, str] = {}
    if configs and configs[0].is_file():
        commands["look at it"] = f"lrlhf inspect {shlex.quote(short_path(configs[0].parent))}"
    # of a plain LightningCLI the config names no classes, and no command of ours could read it
    readable = any("class_path" in (callback.config.get("model") or ()) for callback in saved)
    if readable and _RESUMED in folders and configs[0].is_file():
        config = shlex.quote(short_path(configs[0]))
        last = shlex.quote(short_path(folders[_RESUMED]))
        if more := _twice_as_long(trainer):
            commands["train on"] = f"lrlhf fit --config {config} --ckpt_path last {more}"
        if any(trainer.num_val_batches):
            commands["evaluate"] = f"lrlhf validate --config {config} --ckpt_path {last}"
        if _EXPORTED not in folders:
            commands["export"] = f"lrlhf export --config {config} --ckpt_path {last} --output DIR"
    if _EXPORTED in folders and isinstance(trainer.lightning_module, SamplesResponses):
        commands["talk to it"] = f"lrlhf chat {shlex.quote(short_path(folders[_EXPORTED]))}"
    return commands


def _twice_as_long(trainer: L.Trainer) -> str:
    """The option that lets a run go on; empty: neither steps nor epochs have ended it."""
    if 0 < trainer.max_steps <= trainer.global_step:
        return f"--trainer.max_steps {2 * trainer.global_step}"
    epochs = trainer.max_epochs or -1
    progress: Any = trainer.fit_loop.epoch_progress.current
    if 0 < epochs <= progress.processed:
        return f"--trainer.max_epochs {2 * epochs}"
    return ""


def _change(curve: Curve) -> str:
    """Say where the curve, which has finite values, began and ended."""
    steps, values = curve.finite().steps, curve.finite().values
    if len(steps) == 1:
        return f"{curve.name}: {values[0]:.4g} at step {steps[0]}"
    return (
        f"{curve.name}: {values[0]:.4g} at step {steps[0]} → {values[-1]:.4g} at step "
        f"{steps[-1]} ({values[-1] - values[0]:+.4g})"
    )


def _why_missing(name: str, trainer: L.Trainer) -> str:
    if name in trainer.callback_metrics:
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set outside its class
        return f"no row yet (a row each {every} steps)"
    logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
    return f"never logged (logged: {logged})"


def _evaluation_interval(trainer: L.Trainer) -> str:
    """Say after how many batches or epochs Lightning validates."""
    epochs, batches = trainer.check_val_every_n_epoch, trainer.val_check_batch
    of_epoch = trainer.num_training_batches
    if epochs is None or (epochs == 1 and isinstance(batches, int) and batches < of_epoch):
        return f"{batches} batches"
    return "epoch" if epochs == 1 else f"{epochs} epochs"


def _targets(trainer: L.Trainer) -> dict[str, float]:
    """Values that a controller of the run holds, by metric."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    controls = [callback for callback in callbacks if isinstance(callback, KLControl)]
    adaptive = [control.target for control in controls if control.mode == "adaptive"]
    return {"kl/sequence": adaptive[0]} if adaptive else {}


def _places(trainer: L.Trainer) -> dict[str, Path]:
    """What the run has left on disk, by what it is."""
    folders: dict[str, Path] = {}
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            folders["metrics (CSV)"] = Path(logger.log_dir) / "metrics.csv"
        elif isinstance(logger, TensorBoardLogger):
            folders["metrics (TensorBoard)"] = Path(logger.log_dir)
        elif isinstance(logger, WandbLogger):
            folders["metrics (W&B)"] = Path(logger.experiment.dir).parent
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RolloutLog) and callback.path is not None:
            folders["rollouts"] = callback.path
        elif isinstance(callback, EvalJSONL) and callback.paths:
            folders["evaluations"] = callback.paths[-1]
        elif isinstance(callback, HFExport) and callback.last_export is not None:
            folders[_EXPORTED] = callback.last_export
        elif isinstance(callback, ModelCheckpoint):
            folders |= _checkpoints(callback)
    return folders


def _checkpoints(callback: ModelCheckpoint) -> dict[str, Path]:
    paths = {_RESUMED: callback.last_model_path}
    if callback.monitor is not None:
        paths[f"checkpoint with best {callback.monitor}"] = callback.best_model_path
    elif not callback.last_model_path:
        paths[_RESUMED] = callback.best_model_path
    return {name: Path(path) for name, path in paths.items() if path}
