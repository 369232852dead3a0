"""The trainer: Lightning's, with defaults that keep what a run has done."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import lightning as L
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint, ProgressBar
from lightning.pytorch.plugins.precision import Precision

from lrlhf.arguments import TakesOptions
from lrlhf.callbacks import (
    EvalJSONL,
    HFExport,
    PhaseProgress,
    PredictionJSONL,
    RLCheckpoint,
    RolloutLog,
    RunReport,
)
from lrlhf.callbacks.rl_checkpoint import find_newest
from lrlhf.loggers import ResumingCSVLogger
from lrlhf.modules.contracts import Exportable, HasEvalMode, Measured, SamplesResponses
from lrlhf.run.lightning_internals import start_method_of
from lrlhf.run.log_rows import LogRows
from lrlhf.run.quiet_output import quiet
from lrlhf.run.run_folder import WritesToRunFolder, refuse_remote
from lrlhf.run.supervision.signals import ReusableTrainer
from lrlhf.trainer_options import (
    REPLACED,
    refuse_accelerator,
    refuse_folder,
    refuse_replaced,
    refuse_strategy,
)

GPU_PRECISION: Final = "bf16-mixed"
"""Of runs on a GPU with bfloat16 that name no precision."""


class Trainer(TakesOptions, ReusableTrainer):
    """Lightning's trainer, which keeps metrics, checkpoints, responses and the trained model.

    All of it is below ``default_root_dir``, the run folder: ``metrics.csv`` with a row per step,
    ``checkpoints/``, ``rollouts.jsonl``, ``eval_scores_<step>.jsonl``, ``export/final`` and
    ``reward_curve.png``. A logger or callback of yours takes the place of the default of its kind,
    and one that is given no folder (``dirpath: null``, ``save_dir: null``) writes there too.

    Args:
        default_root_dir: The run folder; None: ``runs/`` and the name of the script, ``notebook``
            where there is none. The command line takes the name of the first config.
        default_callbacks: Add `PhaseProgress`, `RLCheckpoint`, `RolloutLog`, `EvalJSONL`,
            `HFExport` and `RunReport` wherever the module has a use for them and none of the kind
            is given; false: only those that are given.
        options: Those of ``lightning.Trainer``. ``log_every_n_steps`` is 1 where none is given,
            ``enable_model_summary`` false, as `PhaseProgress` says what is trained,
            ``use_distributed_sampler`` false, as the data modules share the rows out themselves,
            ``logger`` a `ResumingCSVLogger`, and ``precision`` bf16-mixed on GPUs that have it,
            unless processes are forked (``ddp_notebook``).
    """

    def __init__(
        self,
        *,
        default_root_dir: str | Path | None = None,
        default_callbacks: bool = True,
        **options: Any,
    ) -> None:
        folder = default_root_dir or Path("runs") / _name_of_script()
        refuse_remote(folder)
        refuse_folder(folder)
        refuse_strategy(options.get("strategy"))
        refuse_accelerator(options.get("accelerator"))
        if options.get("barebones"):
            raise ValueError(
                "barebones allows no logger and no checkpoints, which lrlhf.Trainer adds; take "
                "lightning.Trainer(barebones=True)"
            )
        callbacks = [LogRows(), *_as_list(options.get("callbacks"))]
        shows_progress = options.get("enable_progress_bar") is not False
        if default_callbacks and shows_progress and not _has(callbacks, ProgressBar):
            callbacks.append(PhaseProgress())
        saves = options.get("enable_checkpointing") is not False
        self._checkpoints: RLCheckpoint | None = None
        """Those of the defaults."""
        if default_callbacks and saves and not _has(callbacks, ModelCheckpoint):
            self._checkpoints = RLCheckpoint()
            callbacks.append(self._checkpoints)
        if options.get("logger") in (None, True):
            options["logger"] = ResumingCSVLogger(folder)
        if options.get("log_every_n_steps") is None:
            options["log_every_n_steps"] = 1
        options.setdefault("use_distributed_sampler", False)
        if options.get("enable_model_summary") is None:
            options["enable_model_summary"] = False
        if options.get("precision") is None and not _chooses_precision(options):
            options["precision"] = default_precision(options.get("accelerator") or "auto")
        self._adds_callbacks = default_callbacks
        for logger in _as_list(options["logger"]) if options["logger"] else ():
            if isinstance(logger, WritesToRunFolder):
                logger.use_run_folder(folder)
        with quiet():
            super().__init__(default_root_dir=folder, **{**options, "callbacks": callbacks})

    @property
    def run_folder(self) -> Path:
        """Where everything goes that is given no folder."""
        return Path(self.default_root_dir)

    def fit(
        self,
        model: L.LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: L.LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train as ``lightning.Trainer.fit`` does.

        ``ckpt_path="last"`` continues the run of this folder; where there is no checkpoint yet, it
        says so and starts one.
        """
        is_policy = isinstance(model, SamplesResponses)
        if is_policy or (isinstance(model, Exportable) and not model.automatic_optimization):
            for option in REPLACED:
                value = getattr(self, option)
                refuse_replaced(type(model).__name__, option, value, is_policy=is_policy)
        checkpoint = self._prepare(model, ckpt_path)
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, checkpoint, weights_only)

    def validate(
        self,
        model: L.LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: L.LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Measure on the validation set as ``lightning.Trainer.validate`` does."""
        checkpoint = self._prepare(model, ckpt_path, needed=True)
        return super().validate(model, dataloaders, checkpoint, verbose, datamodule, weights_only)

    def test(
        self,
        model: L.LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: L.LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Measure on the test set as ``lightning.Trainer.test`` does."""
        checkpoint = self._prepare(model, ckpt_path, needed=True)
        return super().test(model, dataloaders, checkpoint, verbose, datamodule, weights_only)

    def predict(
        self,
        model: L.LightningModule | None = None,
        dataloaders: Any = None,
        datamodule: L.LightningDataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Go through the prediction set as ``lightning.Trainer.predict`` does."""
        checkpoint = self._prepare(model, ckpt_path, needed=True)
        return super().predict(
            model, dataloaders, datamodule, return_predictions, checkpoint, weights_only
        )

    def _prepare(
        self,
        model: L.LightningModule | None,
        checkpoint: str | Path | None,
        *,
        needed: bool = False,
    ) -> str | Path | None:
        """Add the callbacks that the module has a use for, and find the checkpoint.

        Raises:
            ValueError: There is no such checkpoint, and it is ``best`` or ``needed``.
        """
        callbacks: list[Callback] = self.callbacks  # type: ignore[attr-defined]
        if model is not None and self._adds_callbacks:
            missing = (each for each in _defaults_for(model) if not _has(callbacks, type(each)))
            # checkpoints are last: they hold the state of all the others
            checkpoints = (
                index for index, each in enumerate(callbacks) if isinstance(each, Checkpoint)
            )
            at = next(checkpoints, len(callbacks))
            callbacks[at:at] = missing
        if self._checkpoints is not None and isinstance(model, Measured):
            mode = model.eval_mode if isinstance(model, HasEvalMode) else "max"
            self._checkpoints.rank_by(model.eval_metric, mode)
        return self._find(checkpoint, needed=needed)

    def _find(self, checkpoint: str | Path | None, *, needed: bool) -> str | Path | None:
        """Return the path of what Lightning finds only in the process that has saved it."""
        callbacks: list[Callback] = self.callbacks  # type: ignore[attr-defined]
        saver = next((each for each in callbacks if isinstance(each, RLCheckpoint)), None)
        if saver is None or "://" in saver.folder_of(self):
            return checkpoint
        if checkpoint == "best" and not saver.best_k_models:
            return saver.find_best(self)
        if checkpoint == "last" and needed:
            return find_newest(Path(saver.folder_of(self)), saver.CHECKPOINT_NAME_LAST, "last")
        return checkpoint


def default_precision(accelerator: Any) -> str | None:
    """Return the precision of a run that names none; None: Lightning's own, float32.

    On a GPU whose cores multiply bfloat16, products in float32 take several times as long, and
    weights, gradients and optimizer states stay float32 with ``bf16-mixed``.
    """
    on_gpu = isinstance(accelerator, CUDAAccelerator) or accelerator in ("auto", "gpu", "cuda")
    if on_gpu and CUDAAccelerator.is_available():
        multiplies = torch.cuda.is_bf16_supported(including_emulation=False)
        return GPU_PRECISION if multiplies else None
    return None


def _chooses_precision(options: dict[str, Any]) -> bool:
    """Whether a plugin names one, or processes are forked: to ask a GPU would be too early then."""
    plugins = _as_list(options.get("plugins"))
    named = any(isinstance(each, Precision) for each in plugins)
    strategy = options.get("strategy")
    start = getattr(strategy, "start_method", None) or start_method_of(strategy)
    return named or "fork" in str(start or strategy) or "notebook" in str(strategy)


def _defaults_for(model: L.LightningModule) -> Iterator[Callback]:
    yield PredictionJSONL()
    if isinstance(model, SamplesResponses):
        yield RolloutLog()
    if isinstance(model, Measured):
        records = EvalJSONL()
        records.needs_records = False  # a step of the user's own may have none
        yield records
    if isinstance(model, Exportable):
        yield HFExport()
    if isinstance(model, Measured):
        yield RunReport()


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Iterable) else [value]


def _has(callbacks: list[Callback], kind: type) -> bool:
    return any(isinstance(each, kind) for each in callbacks)


def _name_of_script() -> str:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(path).stem if path else "notebook"
