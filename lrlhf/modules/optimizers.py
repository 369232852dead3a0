"""One description of optimizer and learning-rate schedule, shared by all modules."""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lrlhf.options.conversion import settings
from lrlhf.torch_internals import leave_scale_to_caller

_ADAMW = "torch.optim.AdamW"
_LR = 1e-5
_EXCLUDES_FUSED = {"foreach", "differentiable"}
"""Options of AdamW that choose another implementation."""


class OptimizerAndScheduler(NamedTuple):
    """An optimizer, and the schedule that its owner steps after every optimizer step."""

    optimizer: Optimizer
    scheduler: LambdaLR


@settings
@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay on matrices only, and a learning-rate schedule.

    Args:
        lr: Peak learning rate. None: what the module holds for right, which is 1e-5 for a
            `RewardModel`, 1e-6 for a policy; for a critic see `Critic`.
        betas: Decay rates of AdamW's running mean and running square of the gradient.
        weight_decay: Decoupled decay of parameters with two or more axes; biases, norms and
            scalars never decay.
        eps: Added to AdamW's denominator.
        schedule: Course of the learning rate after the warm-up: it stays, or falls in a straight
            line or half a cosine to ``min_lr_fraction`` of the peak at the last step.
        warmup_steps: Optimizer steps of linear warm-up; a value below 1 is that fraction of all
            steps. Step s of W warm-up steps runs at (s + 1) / (W + 1) of the peak, so that,
            unlike in ``transformers``, no step is wasted at zero. None: 0.03 in a `RewardModel`,
            none elsewhere.
        min_lr_fraction: Where a falling schedule ends, as a fraction of ``lr``.
        fused: Whether AdamW runs its fused kernel, which goes through weights, gradients and
            moments once. None: where it can, which is on CPUs and Nvidia's GPUs with weights in
            float32. A resumed run goes on with the kernel that it was started with.
        optimizer_class: Dotted path of another ``torch.optim.Optimizer``. It is given ``lr``, the
            parameter groups with their ``weight_decay``, and ``optimizer_options``; ``betas``,
            ``eps`` and ``fused`` belong to AdamW alone.
        optimizer_options: Further keyword arguments of the optimizer's constructor.

    Raises:
        ValueError: A value is outside its range, or does not belong to this optimizer.
    """

    lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    eps: float = 1e-8
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int | float | None = None
    min_lr_fraction: float = 0.0
    fused: bool | None = None
    optimizer_class: str = _ADAMW
    optimizer_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # optimizers store them in checkpoints, which cannot hold numbers of NumPy
        for name in ("lr", "weight_decay", "eps", "warmup_steps", "min_lr_fraction"):
            value = getattr(self, name)
            object.__setattr__(self, name, value.item() if isinstance(value, np.generic) else value)
        object.__setattr__(self, "betas", tuple(map(float, self.betas)))
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"optimizer.lr is {self.lr}, expected a positive number")
        if self.weight_decay < 0:
            raise ValueError(f"optimizer.weight_decay is {self.weight_decay}, expected 0 or more")
        if not 0 <= self.min_lr_fraction <= 1:
            raise ValueError(
                f"optimizer.min_lr_fraction is {self.min_lr_fraction}, expected 0 to 1"
            )
        steps = self.warmup_steps or 0
        if steps < 0 or (steps >= 1 and steps % 1 != 0):
            raise ValueError(
                f"optimizer.warmup_steps is {self.warmup_steps}, expected a fraction of all steps "
                "(0 to 1) or a whole number of steps"
            )
        if self.optimizer_class != _ADAMW:
            self._refuse_adamw_options()

    def filled(self, *, lr: float, warmup_steps: int | float = 0) -> OptimizerConfig:
        """Return it with a module's own choices in the place of what is None."""
        return replace(
            self,
            lr=lr if self.lr is None else self.lr,
            warmup_steps=warmup_steps if self.warmup_steps is None else self.warmup_steps,
        )

    def build(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        total_steps: float,
        *,
        lrs: Mapping[str, float] | None = None,
    ) -> OptimizerAndScheduler:
        """Build the optimizer of the parameters that require gradients, and its schedule.

        Args:
            named_parameters: As from ``module.named_parameters()``; frozen ones are left out.
            total_steps: Optimizer steps of the whole run; ``inf`` where the run has no end, which
                only a constant schedule with a whole number of warm-up steps can follow.
            lrs: Other peak learning rates, of parameters whose names begin so.

        Raises:
            ValueError: No parameter requires gradients, the schedule needs to know an end that
                the run has not, or the optimizer refuses its options.
        """
        groups = parameter_groups(named_parameters, weight_decay=self.weight_decay, lrs=lrs)
        optimizer = self._optimizer(groups)
        return OptimizerAndScheduler(optimizer, LambdaLR(optimizer, self.lr_factor(total_steps)))

    def lr_factor(self, total_steps: float) -> Callable[[int], float]:
        """Return the function from steps taken to the fraction of the peak learning rate."""
        warmup = self._warmup(total_steps)
        if math.isinf(total_steps) and self.schedule != "constant":
            raise ValueError(
                f"optimizer.schedule {self.schedule!r} falls towards the last step, but this run "
                "has none: set trainer.max_steps or trainer.max_epochs, or use constant"
            )
        decay, floor = _DECAYS[self.schedule], self.min_lr_fraction

        # A closure, not an object: LambdaLR would store an object's attributes in checkpoints, and
        # a run resumed with more steps would keep the end of the old one.
        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            progress = min(1.0, (step - warmup) / max(1.0, total_steps - warmup))
            return floor + (1 - floor) * decay(progress)

        return factor

    def _warmup(self, total_steps: float) -> int:
        steps = self.warmup_steps or 0
        if not 0 < steps < 1:
            return int(steps)
        if math.isinf(total_steps):
            raise ValueError(
                f"optimizer.warmup_steps {steps} is a fraction of all steps, but this "
                "run has no end: set trainer.max_steps or trainer.max_epochs, or give a number of "
                "steps"
            )
        return math.ceil(steps * total_steps)

    def _optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        options = dict(self.optimizer_options)
        if self.optimizer_class == _ADAMW:
            fused = self.fused
            if fused is None and not _EXCLUDES_FUSED & options.keys():
                fused = _can_fuse(groups) or None
            options = {"betas": self.betas, "eps": self.eps, "fused": fused, **options}
        optimizer_class = _resolve_optimizer(self.optimizer_class)
        try:
            optimizer = optimizer_class(groups, lr=self.lr or _LR, **options)  # type: ignore[call-arg]
        except TypeError as error:
            raise ValueError(
                f"optimizer.optimizer_options {sorted(self.optimizer_options)} do not fit "
                f"{self.optimizer_class}: {error}"
            ) from error
        if isinstance(optimizer, AdamW):
            # else Lightning clips nothing; gradients are unscaled before they are looked at here
            leave_scale_to_caller(optimizer)
        return optimizer

    def _refuse_adamw_options(self) -> None:
        for name, default in (("betas", (0.9, 0.999)), ("eps", 1e-8), ("fused", None)):
            value = self.__dict__[name]
            if (tuple(value) if name == "betas" else value) != default:
                raise ValueError(
                    f"optimizer.{name} belongs to AdamW, not to {self.optimizer_class}: put it "
                    f"into optimizer.optimizer_options"
                )


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    weight_decay: float,
    lrs: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Split the trainable parameters into those that decay and those that do not.

    Parameters with fewer than two axes are biases, the gains of norms and scalars: pulling them
    to zero regularises nothing.

    Args:
        named_parameters: Frozen ones are left out.
        weight_decay: Of those that decay.
        lrs: Learning rates of their own, of parameters whose names begin so.
    """
    named = [(name, weight) for name, weight in named_parameters if weight.requires_grad]
    if lrs:
        return _groups_by_name(named, weight_decay, lrs)
    trainable = [parameter for _, parameter in named]
    if not trainable:
        raise ValueError(
            "no parameter requires gradients: unfreeze some of the model, or give it a LoRA"
        )
    matrices = [parameter for parameter in trainable if parameter.ndim >= 2]
    others = [parameter for parameter in trainable if parameter.ndim < 2]
    groups = ((matrices, weight_decay), (others, 0.0))
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def _groups_by_name(
    named: Sequence[tuple[str, nn.Parameter]], weight_decay: float, lrs: Mapping[str, float]
) -> list[dict[str, Any]]:
    others = [parameter for parameter in named if not parameter[0].startswith(tuple(lrs))]
    groups = parameter_groups(others, weight_decay=weight_decay) if others else []
    for beginning, lr in lrs.items():
        own = [each for each in named if each[0].startswith(beginning)]
        if own:
            groups += [
                {**group, "lr": lr} for group in parameter_groups(own, weight_decay=weight_decay)
            ]
    return groups


def _can_fuse(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether AdamW's fused kernel does for these weights just what the others do.

    It reads weights and moments as they lie in memory, so they must lie in order.
    """
    return all(
        parameter.device.type in ("cpu", "cuda")
        and parameter.dtype == torch.float32
        and parameter.is_contiguous()
        for group in groups
        for parameter in group["params"]
    )


def _resolve_optimizer(path: str) -> type[Optimizer]:
    try:
        kind = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"optimizer.optimizer_class {path!r} cannot be imported: {error}"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ValueError(f"optimizer.optimizer_class {path!r} is no torch.optim.Optimizer")
    return kind


def _half_cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


_DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda progress: 1 - progress,
    "cosine": _half_cosine,
}
