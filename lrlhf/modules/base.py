"""What a module does for Lightning whatever it trains; the base of a module of your own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import lrlhf.strategies  # noqa: F401  registers its names with Lightning
from lrlhf.arguments import ShowsOptions, all_arguments
from lrlhf.guard.anomalies import Anomaly, Guard, StepVerdict, refuse_policy_limits
from lrlhf.guard.dump import StepBundle
from lrlhf.guard.step_guard import StepGuard
from lrlhf.models import ReferencePolicy, TextLimits, TokenBudget, limits_of
from lrlhf.models.loading.deferred_weights import read, reading
from lrlhf.models.sharding import load_state
from lrlhf.modules.checks import (
    prepare_trainer,
    refuse_other_weights,
    refuse_pure_low_precision,
    refuse_rate_finder,
    uses_loss_scaler,
)
from lrlhf.modules.contracts import Exportable
from lrlhf.modules.hyperparameters import (
    as_hyperparameters,
    build_again,
    read_hyperparameters,
    refuse_other_module,
)
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.optimizers import OptimizerAndScheduler, OptimizerConfig
from lrlhf.run import (
    SplitsModels,
    Updater,
    count_iterations_as_steps,
    log_without_copies,
    run_seed,
    seed_everything_for,
)
from lrlhf.run.atomic import atomic_folder
from lrlhf.run.checkpoints.checkpoint_reader import read_checkpoint
from lrlhf.run.checkpoints.checkpoint_search import check
from lrlhf.run.collectives import LoadsShards, from_rank_zero
from lrlhf.run.lightning_internals import log_hyperparameters_once, set_hyperparameters, trainer_of
from lrlhf.run.quiet_output import quiet

_SUBFOLDERS = ("critic", "additional_chat_templates")
"""Of a saved model."""


class Stateful(Protocol):
    """A part whose state belongs into checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        ...


class SteppedOptimizer(NamedTuple):
    """An optimizer that takes a step."""

    position: int
    """Among the module's optimizers."""
    role: str
    """What metrics call it; empty: nothing is measured."""
    max_grad_norm: float
    freeze_steps: int = 0
    """Iterations at the start in which its model is frozen."""


class TrainingModule(ShowsOptions, L.LightningModule):
    """A LightningModule with manual optimization that is seeded, guarded and resumed exactly.

    A subclass defines ``trainable_models``, ``configure_optimizers`` and ``training_step``, and may
    add parts to ``stateful``. One ``training_step`` counts as one step of the trainer, however many
    optimizer steps it takes. What it gets from here: strategies find its models, checkpoints are
    whole or absent and hold the state of all parts, 16-bit weights without a master copy are
    refused, and `take_step` clips, leaves out what is not finite, and counts it.

    Args:
        guard: Which steps are left out, and when to give up.
        seed: Seeds every random number of the run, together with rank and step; None: the seed of
            ``seed_everything``.

    Example:
        A complete module is ``examples/orpo.py``.
    """

    returns_loss: ClassVar[bool] = False
    """Whether ``training_step`` returns the step's loss, which Lightning's ``Tuner`` goes by."""

    def __init__(self, *, guard: Guard = Guard(), seed: int | None = None) -> None:  # noqa: B008
        super().__init__()
        set_hyperparameters(self, as_hyperparameters(type(self), all_arguments(self)))
        self.automatic_optimization = False
        self.seed = run_seed(seed)
        self.step_guard = StepGuard(guard)
        self.gradients = Updater(self)
        self.token_budget = TokenBudget()
        """Of a forward and backward pass, where nothing else says how large it may be."""
        self.stateful: dict[str, Stateful] = {"guard": self.step_guard}
        """Parts whose state is saved under ``checkpoint["lrlhf"]``, by name."""

    def trainable_models(self) -> dict[str, nn.Module]:
        """Models that receive gradients, by role, in the order of their optimizers."""
        raise NotImplementedError

    def text_limits(self, *, training: bool) -> list[TextLimits]:
        """Return what the models can read; data modules refuse other rows before the first step.

        Args:
            training: Of rows that are trained on, rather than evaluated.
        """
        del training
        return limits_of(self.trainable_models().values())

    @property
    def skipped_steps(self) -> int:
        """Steps that were left out so far, resumed runs included."""
        return self.step_guard.skipped

    # ---- one step

    def seed_step(self, *path: int) -> tuple[int, ...]:
        """Seed all random number generators for this step; returns what they were seeded with.

        Args:
            path: Further numbers, such as that of the optimizer step within this one.
        """
        seeds = (self.seed, self.global_step, self.trainer.global_rank, *path)
        seed_everything_for(*seeds)
        return seeds

    def optimizer_of(self, index: int) -> LightningOptimizer:
        """Return one of the optimizers, in the order of `trainable_models`."""
        optimizers = self.optimizers()
        optimizer = optimizers[index] if isinstance(optimizers, list) else optimizers
        assert isinstance(optimizer, LightningOptimizer)
        return optimizer

    def take_step(self, loss: Tensor, *, index: int = 0, max_grad_norm: float = 1.0) -> float:
        """Go backward, clip, step and advance the schedule.

        Args:
            loss: Of this rank; gradients are averaged over the ranks.
            index: Which optimizer.
            max_grad_norm: Clip the gradient to this norm; ``inf`` leaves it.

        Returns:
            The gradient's norm before clipping; not finite: all ranks left the step out.

        Raises:
            TrainingDivergedError: More steps were left out than the guard's quota.
        """
        self.gradients.backward(loss, last=True)
        (norm,) = self.step_optimizers([SteppedOptimizer(index, "", max_grad_norm)])
        self.advance_schedule(index)
        return norm

    def step_optimizers(
        self,
        optimizers: Sequence[SteppedOptimizer],
        verdict: StepVerdict = StepVerdict(skips=False, anomalies=[]),  # noqa: B008  immutable
        *,
        metrics: MetricSums | None = None,
        bundle: Callable[[], StepBundle] | None = None,
    ) -> list[float]:
        """Clip and step, unless the guard objects or a gradient is not finite.

        Args:
            optimizers: That step, in this order.
            verdict: Of the guard, on what was seen before.
            metrics: Told the norms of the gradients.
            bundle: Makes what a dump holds of the step; None: it is not dumped.

        Returns:
            The norms of the gradients before clipping; not finite: all ranks left the step out.

        Raises:
            TrainingDivergedError: More steps were left out than the guard's quota.
        """
        anomalies, left_out, norms = list(verdict.anomalies), verdict.skips, []
        for optimizer in optimizers:
            norm = self.gradients.step(
                self.optimizer_of(optimizer.position),
                max_grad_norm=optimizer.max_grad_norm,
                leave_out=verdict.skips,
            )
            norms.append(norm)
            if verdict.skips:
                continue
            if math.isfinite(norm):
                if metrics is not None:
                    metrics.add(f"{optimizer.role}/grad_norm", norm, 1.0)
            elif not uses_loss_scaler(self.trainer):  # which finds its scale by overflowing
                left_out = True
                if self.trainer.global_rank == 0:  # the norm is the same on all
                    whose = f"the {optimizer.role} gradient" if optimizer.role else "the gradient"
                    anomalies.append(Anomaly("gradient", f"{whose} is not finite"))
        if left_out:
            self.step_guard.report(anomalies, bundle, self)
        return norms

    def advance_schedule(self, index: int) -> None:
        """Let the learning rate of one optimizer go on by one step."""
        schedulers = self.lr_schedulers()
        scheduler = schedulers[index] if isinstance(schedulers, list) else schedulers
        if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            advance(scheduler)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.before_step(optimizer)

    def shard_frozen(self, reference: ReferencePolicy, *, offload: bool = False) -> None:
        """Have a reference split over the ranks as trained models are; from ``on_fit_start``.

        Args:
            reference: Stays whole where the strategy splits nothing.
            offload: It waits in main memory between its passes, and stays whole for that.
        """
        strategy = self.trainer.strategy
        if not isinstance(strategy, LoadsShards):
            read(reference.model, "cpu")
        if isinstance(strategy, SplitsModels):
            reference.split(partial(strategy.shard_frozen, full=offload))

    # ---- Lightning's hooks

    def setup(self, stage: str) -> None:
        prepare_trainer(self.trainer, stage)
        if not isinstance(self.trainer.strategy, LoadsShards):  # the one that it was built for did
            read(self, "cpu")
        log_hyperparameters_once(self.trainer)
        if stage == "fit":
            log_without_copies(self.trainer)
            if not (self.automatic_optimization or self.returns_loss):
                refuse_rate_finder(self.trainer, self)
            for model in self.trainable_models().values():
                refuse_pure_low_precision(self.trainer, model)
            if not self.automatic_optimization:
                count_iterations_as_steps(self.trainer)

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]  # Lightning's is no plain class method
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **arguments: Any,
    ) -> Self:
        """Build the module of a checkpoint, of one process or of many, and fill it.

        What it was built from is in the checkpoint as far as it is plain or can be imported;
        models that were built already, lambdas, secrets and models with code of their own are not,
        and must be passed. Reward functions are imported by their names: load checkpoints that you
        trust.

        Args:
            checkpoint_path: File, or folder of a run whose models were split.
            map_location: Device of the module; None: the CPU.
            hparams_file: YAML file that takes the place of the hyperparameters in the checkpoint.
            strict: False: keep the weights that the checkpoint does not have, and leave out those
                that the module does not have.
            weights_only: False: run code that comes with the checkpoint.
            arguments: Of the constructor, in the place of those in the checkpoint.

        Raises:
            CheckpointMismatchError: The checkpoint is that of another model.
            NotACheckpointError: It is damaged, or none.
            ValueError: An argument must be passed; names it.
        """
        path = Path(checkpoint_path)
        check(path)
        checkpoint = read_checkpoint(path, weights_only=weights_only is not False)
        stored = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})
        if hparams_file is not None:
            stored = read_hyperparameters(Path(hparams_file))
        with reading(later=False):
            module = build_again(cls, stored, arguments, where=path)
        if strict is not False:
            module.on_load_checkpoint(checkpoint)
        load_state(module, checkpoint["state_dict"], strict=strict is not False)
        return module if map_location is None else module.to(map_location)

    # ---- what a person asks of it

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write what was trained and its tokenizer into a folder that ``transformers`` loads.

        A `PPO` with a critic of its own writes that into ``critic`` inside. The folder appears
        whole or not at all. Where weights are split, all ranks call this.

        Args:
            folder: Must not exist or be empty.
            overwrite: Replace the whole folder, if there is a saved model in it.

        Raises:
            FileExistsError: There is something that must not be replaced.
            ValueError: The module has no ``export_pretrained``.
        """
        if not isinstance(self, Exportable):
            raise ValueError(f"{type(self).__name__} has no export_pretrained() to write a model")
        path = Path(folder)
        refuse = partial(_refuse_to_replace, path, overwrite=overwrite)
        trainer = trainer_of(self)
        strategy = None if trainer is None else trainer.strategy
        if isinstance(strategy, SplitsModels):  # all ranks are here, and would wait for this one
            from_rank_zero(strategy, refuse)
        elif self.global_rank == 0:
            refuse()
        if self.global_rank != 0:
            self.export_pretrained(None)
            return
        with quiet(), atomic_folder(path) as fresh:
            self.export_pretrained(fresh)

    def summary(self) -> dict[str, str]:
        """Say in a few words what the module is made of, by name; a line each in its ``repr``."""
        if type(self).trainable_models is TrainingModule.trainable_models:
            return {}
        return {role: _model_summary(model) for role, model in self.trainable_models().items()}

    def __repr__(self) -> str:
        lines = [f"  {name}: {text}" for name, text in self.summary().items()]
        return "\n".join([type(self).__name__, *lines])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["lrlhf"] = {name: part.state_dict() for name, part in self.stateful.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        refuse_other_module(type(self), checkpoint, "what is loaded")
        refuse_other_weights(self, checkpoint)
        if missing := self.stateful.keys() - checkpoint["lrlhf"].keys():
            raise ValueError(
                f"the checkpoint holds no state of {', '.join(sorted(missing))}, which this "
                "configuration keeps (of a teacher: a moving average, as with teacher.update_rate "
                "between 0 and 1): resume with the configuration that the run was started with, or "
                "start a new run from the weights"
            )
        for name, part in self.stateful.items():
            part.load_state_dict(checkpoint["lrlhf"][name])


def _refuse_to_replace(path: Path, *, overwrite: bool) -> None:
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(
            f"{path} is there and not empty: pass overwrite=True, or another name"
        )
    inside = [*path.iterdir()] if path.is_dir() else []
    model = any(part.name == "config.json" for part in inside) and any(
        part.name.endswith((".safetensors", ".safetensors.index.json", ".bin")) for part in inside
    )
    if not model or any(part.is_dir() and part.name not in _SUBFOLDERS for part in inside):
        raise FileExistsError(
            f"{path} is no saved model and nothing else, and overwrite=True would remove all that "
            "is in it: choose another name"
        )


def advance(scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    """Take one step of a schedule; steps that the optimizer has left out count too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler")
        scheduler.step()


def _model_summary(model: nn.Module) -> str:
    """Name a model, and count its parameters; those that are shared or frozen count once."""
    weights = list(model.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    total = sum(weight.numel() for weight in weights)
    config = getattr(model, "config", None)
    source = getattr(config, "name_or_path", "")
    name = f"{type(model).__name__} of {source}" if source else type(model).__name__
    kinds = sorted({str(weight.dtype).removeprefix("torch.") for weight in weights})
    devices = sorted({str(weight.device) for weight in weights})
    places = f"{', '.join(kinds)} on {', '.join(devices)}"
    return f"{name}, {total:,} parameters, {trained:,} of them trained, {places}"


_WARMUP = 0.03
"""Share of a run's steps, where the optimizer does not say."""


class SingleModelModule(TrainingModule):
    """Trains one model with one optimizer, and returns the loss of every step.

    Lightning's ``Tuner`` finds learning rates and batch sizes for it.

    Args:
        optimizer: AdamW and its schedule.
        max_grad_norm: Clip the gradient to this norm.
        guard: When an optimizer step is left out.
        seed: Seeds dropout.
    """

    returns_loss = True
    default_lr: ClassVar[float]
    """Where the optimizer names none."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if isinstance(vars(cls).get("lr"), int | float):
            raise TypeError(f"{cls.__name__}.lr is the rate in force: set default_lr")

    def __init__(
        self,
        *,
        optimizer: OptimizerConfig,
        max_grad_norm: float,
        guard: Guard,
        seed: int | None,
    ) -> None:
        super().__init__(guard=guard, seed=seed)
        refuse_policy_limits(guard, type(self).__name__)
        if max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm}; it must be above 0")
        self.optimizer_config = optimizer
        self.max_grad_norm = max_grad_norm

    @property
    def lr(self) -> float:
        """Peak learning rate: that of ``optimizer``, or what the module holds for right.

        A change acts from the next step on, and is saved in checkpoints.
        """
        return self.optimizer_config.lr or self.default_lr

    @lr.setter
    def lr(self, rate: float) -> None:
        self.optimizer_config = replace(self.optimizer_config, lr=rate)
        self.hparams.update(as_hyperparameters(type(self), {"optimizer": self.optimizer_config}))
        for scheduler in self._schedulers():
            scheduler.base_lrs = [rate] * len(scheduler.base_lrs)
            self._follow(scheduler)

    def option_in_force(self, name: str) -> Any:
        return self.optimizer_config if name == "optimizer" else super().option_in_force(name)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer, scheduler = self.built_optimizer(self.trainer.estimated_stepping_batches)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def built_optimizer(self, steps: float) -> OptimizerAndScheduler:
        """Build the optimizer and its schedule over so many steps."""
        # a share of a run without an end is nothing
        warmup = _WARMUP if math.isfinite(steps) else 0
        config = self.optimizer_config.filled(lr=self.default_lr, warmup_steps=warmup)
        (model,) = self.trainable_models().values()
        return config.build(model.named_parameters(), steps)

    def on_train_start(self) -> None:
        for scheduler in self._schedulers():  # LearningRateFinder has set the peak, without warm-up
            self._follow(scheduler)

    def _schedulers(self) -> list[LambdaLR]:
        trainer = trainer_of(self)
        configs = [] if trainer is None else trainer.lr_scheduler_configs
        return [each.scheduler for each in configs if isinstance(each.scheduler, LambdaLR)]

    @staticmethod
    def _follow(scheduler: LambdaLR) -> None:
        """Set the rates of the next step as the schedule has them."""
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
        rates = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, factors, strict=True)
        for group, peak, factor in rates:
            group["lr"] = peak * factor
