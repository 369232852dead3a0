"""What modules that train one model with one optimizer have in common."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim.lr_scheduler import LambdaLR

from lrlhf.guard.anomalies import Guard, refuse_policy_limits
from lrlhf.modules.base import TrainingModule
from lrlhf.modules.hyperparameters import as_hyperparameters
from lrlhf.modules.optimizers import OptimizerAndScheduler, OptimizerConfig
from lrlhf.run.lightning_internals import trainer_of

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
