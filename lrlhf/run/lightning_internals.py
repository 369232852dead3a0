"""What this library does with private parts of Lightning; nothing else may touch them.

When Lightning changes, this and `lrlhf.run.lightning_loops` are the files to look at;
`tests/test_layers.py` keeps it so.
"""

from __future__ import annotations

import copy
import subprocess
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import lightning as L
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    Strategy,
)
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from torch.distributed.constants import default_pg_timeout

from lrlhf.run.seeding import model_step

Launcher: TypeAlias = _Launcher

# ---------------------------------------------------------------- checkpoints


class FindsLast(ModelCheckpoint):
    """Answers the trainer, which asks before it sets anything up, for ``--ckpt_path last``."""

    def find_last(self, trainer: L.Trainer, folder: Path) -> Path | None:
        """Return the checkpoint of a folder of this machine that a run goes on from."""
        raise NotImplementedError

    def folder_of(self, trainer: L.Trainer) -> str:
        """Return the folder of the checkpoints, which may be of a remote file system."""
        return str(self._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]

    def _find_last_checkpoints(self, trainer: L.Trainer) -> set[str]:
        folder = self.folder_of(trainer)
        if "://" in folder:
            # Lightning leaves the protocol out, and then looks for them on this machine
            elsewhere = super()._find_last_checkpoints(trainer)
            return {str(self._fs.unstrip_protocol(path)) for path in elsewhere}
        checkpoint = self.find_last(trainer, Path(folder))
        return set() if checkpoint is None else {str(checkpoint)}


def logged_in_validation(trainer: L.Trainer) -> set[str]:
    """Return the names of what the validation loop logs."""
    results = trainer.fit_loop.epoch_loop.val_loop._results
    return {result.meta.name for result in results.values()}


def step_values(trainer: L.Trainer) -> dict[str, Any]:
    """Return what training steps logged last, by name: another object after each log."""
    results = trainer.fit_loop.epoch_loop._results
    return {result.meta.name: result._forward_cache for result in results.values()}


def next_log_row(trainer: L.Trainer) -> tuple[dict[str, Any], int] | None:
    """Return the metrics and the step of the row that is written when the callbacks are done.

    To be asked in a callback at the end of a training batch or of a training epoch.
    """
    loop, connector = trainer.fit_loop, trainer._logger_connector
    batches: Any = loop.epoch_loop.batch_progress.total
    epochs: Any = loop.epoch_progress.total
    if batches.processed > batches.completed:
        accumulates = trainer.lightning_module.automatic_optimization and loop._should_accumulate()
        if accumulates or not connector.should_update_logs:
            return None
    elif epochs.processed == epochs.completed:
        return None
    return dict(connector.metrics["log"]), trainer.global_step


def forget_last_step(trainer: L.Trainer) -> None:
    """Have a row hold what was measured since the row before it: Lightning repeats older values.

    To be called at the start of a training batch. The micro-batches of a step share its row, and so
    do the steps since the row before.
    """
    loop = trainer.fit_loop.epoch_loop
    before = loop.batch_progress.current.ready - 1
    if trainer.lightning_module.automatic_optimization and before % trainer.accumulate_grad_batches:
        return
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    if every and loop._batches_that_stepped % every:
        return
    for result in loop._results.values():
        result._forward_cache = None


def number_log_rows(trainer: L.Trainer) -> None:
    """Number the rows of all logs as `running_step` says: those of Lightning are one behind."""

    def log_metrics(metrics: dict[str, Any], step: int | None = None) -> None:
        if step is None and metrics and "step" not in metrics:
            metrics, step = {"epoch": trainer.current_epoch, **metrics}, model_step(trainer)
        _LoggerConnector.log_metrics(trainer._logger_connector, metrics, step)

    trainer._logger_connector.log_metrics = log_metrics  # type: ignore[method-assign]


# ---------------------------------------------------------------- signals and the end of a run


def replace_signal_handlers(
    trainer: L.Trainer,
    on_sigterm: Callable[[int, FrameType | None], None],
    on_requeue: Callable[[int, FrameType | None], None],
) -> Callable[[int, FrameType | None], None]:
    """Replace what Lightning does inside its signal handlers, which it registers later.

    Returns:
        Lightning's own answer to SLURM's requeue signal.
    """
    connector = trainer._signal_connector
    requeue = connector._slurm_sigusr_handler_fn
    connector._sigterm_notifier_fn = on_sigterm  # type: ignore[method-assign,assignment]
    connector._slurm_sigusr_handler_fn = on_requeue  # type: ignore[method-assign,assignment]
    # it tells all ranks of rank zero's note only, and takes any error of the network for a no
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    return requeue  # type: ignore[return-value]


def end_loops_early(trainer: L.Trainer) -> None:
    """Have the loops of a trainer end as after a SIGTERM."""
    trainer._signal_connector.received_sigterm = True


def at_teardown(trainer: L.Trainer, function: Callable[[], None]) -> None:
    """Call a function after every teardown of a trainer, which also comes after an error."""
    torn_down = trainer._teardown

    def tear_down() -> None:
        try:
            torn_down()
        finally:
            function()

    trainer._teardown = tear_down  # type: ignore[method-assign]


# ---------------------------------------------------------------- processes


def is_forking(launcher: Launcher | None) -> bool:
    """Tell whether a launcher forks or spawns its processes, and only waits for them."""
    return isinstance(launcher, _MultiProcessingLauncher)


def waits_for_others(launcher: Launcher | None) -> bool:
    """Tell whether this process has forked others and waits for them."""
    return isinstance(launcher, _MultiProcessingLauncher) and bool(launcher.procs)


def launched_processes(trainer: L.Trainer) -> list[subprocess.Popen[bytes]]:
    """Return the ranks that this process has started, the next one first."""
    launcher = trainer.strategy.launcher
    return launcher.procs if isinstance(launcher, _SubprocessScriptLauncher) else []


def retire_observer() -> None:
    """Stop Lightning's thread that kills this process when one that it launched fails.

    It sends SIGKILL, so that neither message nor exit status says what happened, also while this
    process is still writing its last checkpoint.
    """
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            thread._child_processes = []


def process_group_timeout(trainer: L.Trainer) -> timedelta:
    """Return how long a collective waits for the other ranks."""
    strategy = trainer.strategy
    if isinstance(strategy, DDPStrategy | ModelParallelStrategy):
        return strategy._timeout or default_pg_timeout
    return default_pg_timeout


def timeout_of(strategy: Strategy) -> timedelta | None:
    """Return how long ranks wait for each other; None: as long as torch lets them."""
    timeout: timedelta | None = getattr(strategy, "_timeout", None)
    return timeout


# ---------------------------------------------------------------- strategies, modules, optimizers


def looks_for_unused_parameters(strategy: DDPStrategy) -> bool:
    """Tell whether DistributedDataParallel was told to look for parameters without gradients."""
    return bool(strategy._ddp_kwargs.get("find_unused_parameters", False))


def choose_backend(strategy: DDPStrategy, backend: str) -> None:
    """Set the back end of the process group, unless the user chose one."""
    strategy._process_group_backend = strategy._process_group_backend or backend


def start_processes_by(strategy: ParallelStrategy, method: str) -> None:
    """Set how a strategy starts its processes where its constructor has no option for it."""
    strategy._start_method = method  # type: ignore[attr-defined]


def start_method_of(strategy: object) -> str | None:
    """Return how a strategy starts its processes; None: it has no choice."""
    method: str | None = getattr(strategy, "_start_method", None)
    return method


def join_deepspeed(strategy: DeepSpeedStrategy) -> None:
    """Have DeepSpeed connect the processes, which it does on CPUs too."""
    strategy._init_deepspeed_distributed()


def trainer_of(module: L.LightningModule) -> L.Trainer | None:
    """Return the trainer of a module, if it has one."""
    return module._trainer


def set_hyperparameters(module: L.LightningModule, arguments: Mapping[str, Any]) -> None:
    """Have checkpoints and loggers know a module's arguments; on the command line, its config."""
    hyperparameters = _given_hyperparameters.get()
    replace_hyperparameters(module, dict(arguments if hyperparameters is None else hyperparameters))
    module._log_hyperparams = True


def replace_hyperparameters(
    part: L.LightningModule | L.LightningDataModule, hyperparameters: dict[str, Any]
) -> None:
    """Replace what checkpoints and loggers get of a module or a data module."""
    part._set_hparams(hyperparameters)
    part._hparams_initial = copy.deepcopy(part.hparams)  # type: ignore[union-attr]


def log_hyperparameters_once(trainer: L.Trainer) -> None:
    """Leave to the data module's log what is called alike, which Lightning refuses to merge.

    To be called before ``on_fit_start``; checkpoints keep the hyperparameters of both.
    """
    module, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
    if data is not None and data._log_hyperparams:
        logged: Any = module._hparams_initial
        for name in data.hparams_initial:
            logged.pop(name, None)


def has_callback(trainer: L.Trainer | None, kind: type[L.Callback]) -> bool:
    """Whether a trainer has a callback of this kind; during a search Lightning has none."""
    callbacks: list[L.Callback] = getattr(trainer, "callbacks", [])
    return any(isinstance(callback, kind) for callback in callbacks)


def data_in_use(trainer: L.Trainer) -> Any:
    """Return what the loaders of the running stage come from: a data module, or loaders.

    ``trainer.datamodule`` stays that of an earlier call when the trainer is given loaders.
    """
    loop = trainer._active_loop
    return None if loop is None else loop._data_source.instance


build_optimizers = _init_optimizers_and_lr_schedulers
"""Returns what ``configure_optimizers`` of a module says: optimizers, and schedules."""
move_optimizers = _optimizers_to_device
"""Moves the states of optimizers to a device."""


def after_closure(plugin: Precision, module: L.LightningModule, optimizer: Any) -> None:
    """Call the hooks before an optimizer step, and clip as the trainer was told to."""
    plugin._after_closure(module, optimizer)


class Commands(LightningCLI):
    """A command line whose commands can be replaced."""

    def run_command(self, subcommand: str) -> None:
        """Do what the user asked for."""
        super()._run_subcommand(subcommand)

    def _run_subcommand(self, subcommand: str) -> None:
        self.run_command(subcommand)

    def _parse_ckpt_path(self) -> None:
        """Leave the config as it is: Lightning would let what a checkpoint stores overrule it."""


def open_writer(logger: TensorBoardLogger | WandbLogger) -> Any:
    """Return TensorBoard's writer or W&B's run of a log; None: it has none yet, or no more."""
    return logger._experiment


def wandb_options(logger: WandbLogger) -> dict[str, Any]:
    """Return what a W&B log starts its run with."""
    return logger._wandb_init


def forget_writer(logger: TensorBoardLogger) -> None:
    """Have a TensorBoard log open another writer for its next event."""
    logger._experiment = None


def shows_training(bar: TQDMProgressBar) -> bool:
    """Tell whether a progress bar has begun to show the training."""
    return bar._train_progress_bar is not None
