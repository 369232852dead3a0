"""A moving average of the weights beside the ones that are trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn

from lrlhf.arguments import KeepsArguments
from lrlhf.models.sharding import full_shape, of_parts, own_part, part_of, reshard
from lrlhf.modules.contracts import Exportable


class EMA(KeepsArguments, L.Callback):
    """Keeps an exponential moving average of every trainable weight, in float32.

        shadow <- d * shadow + (1 - d) * weight    with d = min(decay, (1 + t) / (10 + t))

    in update t = 1, 2, …: a young average forgets its beginning faster, as in TensorFlow's
    ``ExponentialMovingAverage(num_updates=…)``. Without that, ``decay: 0.999`` would still hold
    95 % of the initial weights after 50 updates.

    It covers what receives gradients, so of a LoRA policy only the adapter. Of weights that are
    split over ranks each rank averages its own parts. The averaged weights
    stand in for the trained ones during validation and, with ``HFExport(use_ema=True)``, in
    exports; checkpoints hold both. `VLLMWeightSync` passes the stand-in on to an engine that has a
    copy of the weights.

    Args:
        decay: Share of the old average that an update keeps in the long run.
        every_n_steps: Steps (of a policy: iterations) between two updates.
        validate: Validate the averaged weights instead of the trained ones.
        device: Where the average is kept; None: beside the weights. ``cpu`` saves GPU memory.
        warmup: Keep less of it in the first updates, see above; False: ``decay`` from the start.

    Raises:
        ValueError: If an option is out of range, the module has no ``trainable_models``, or a
            checkpoint was made with other weights.
    """

    def __init__(
        self,
        decay: float = 0.999,
        every_n_steps: int = 1,
        validate: bool = True,
        device: str | None = None,
        warmup: bool = True,
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"EMA decay is {decay}; it must be at least 0 and below 1, e.g. 0.999")
        if every_n_steps < 1:
            raise ValueError(f"EMA every_n_steps is {every_n_steps}; it must be at least 1")
        self.decay = decay
        self.every_n_steps = every_n_steps
        self.warmup = warmup
        self.validate = validate
        self.device = device
        self.shadows: dict[str, Tensor] = {}
        """This rank's parts of the averages by role and name: ``policy.model.norm.weight``."""
        self._stored: Mapping[str, Tensor] = {}
        self._weights: dict[str, nn.Parameter] = {}
        self._step = 0
        self._replaced: dict[str, Tensor] = {}

    @property
    def stands_in(self) -> bool:
        """Whether the averaged weights are in the module at the moment."""
        return bool(self._replaced)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        _refuse_rounded_weights(trainer, pl_module)
        if not self._known:
            for name, weight in trainable_weights(pl_module).items():
                self.shadows[name] = self._kept(weight, own_part(weight))
        # a checkpoint of another model fails now, not at the next update
        self._pairs(pl_module)

    @property
    def _known(self) -> bool:
        return bool(self.shadows or self._stored)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        # a batch that only accumulated gradients has changed nothing
        if trainer.global_step <= self._step:
            return
        self._step = trainer.global_step
        if self._step % self.every_n_steps:
            return
        # counted from the step, so that a checkpoint needs no number of its own
        updates = self._step // self.every_n_steps
        decay = min(self.decay, (1 + updates) / (10 + updates)) if self.warmup else self.decay
        with torch.no_grad():
            for weight, shadow in self._pairs(pl_module):
                shadow.lerp_(own_part(weight).to(shadow.device, torch.float32), 1 - decay)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.validate and self._known:
            self._put_in(pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._put_back(pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        # before a checkpoint callback, which Lightning runs last, saves what it finds
        self._put_back(pl_module)

    @contextlib.contextmanager
    def averaged(self, module: L.LightningModule) -> Iterator[None]:
        """Put the averaged weights into ``module`` for the duration of the block."""
        self._put_in(module)
        try:
            yield
        finally:
            self._put_back(module)

    def state_dict(self) -> dict[str, Any]:
        if self._replaced:
            raise RuntimeError(
                "a checkpoint was asked for while the averaged weights stand in for the trained "
                "ones; save after validation has ended"
            )
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        shadows = {
            name: of_parts(self._weights[name], shadow, holder=index % world)
            for index, (name, shadow) in enumerate(self.shadows.items())
        }
        return {"shadows": shadows or dict(self._stored), "step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # whole tensors: which parts of them are this rank's shows when the model is there
        self._stored, self.shadows = state_dict["shadows"], {}
        self._step = state_dict["step"]

    @torch.no_grad()
    def _put_in(self, module: L.LightningModule) -> None:
        pairs = self._pairs(module)
        # validation runs in inference mode, whose tensors could not be used in training again
        with torch.inference_mode(False):
            self._replaced = {
                name: own_part(weight).clone() for name, weight in trainable_weights(module).items()
            }
        for weight, shadow in pairs:
            own_part(weight).copy_(shadow)

    @torch.no_grad()
    def _put_back(self, module: L.LightningModule) -> None:
        if not self._replaced:
            return
        for name, weight in trainable_weights(module).items():
            own_part(weight).copy_(self._replaced[name])
        self._replaced = {}

    def _pairs(self, module: L.LightningModule) -> list[tuple[nn.Parameter, Tensor]]:
        self._weights = trainable_weights(module)
        if self._stored:
            with torch.inference_mode(False):
                self._take_parts()
        return [(weight, self.shadows[name]) for name, weight in self._weights.items()]

    def _take_parts(self) -> None:
        """Keep this rank's parts of the averages that a checkpoint held."""
        stored, self._stored = self._stored, {}
        for name in sorted(self._weights.keys() ^ stored.keys()):
            where = "the checkpoint" if name in stored else "the model"
            raise ValueError(
                f"EMA: only {where} has {name!r}; resume with the model (and LoRA settings) that "
                "the run was started with"
            )
        for name, weight in self._weights.items():
            shadow = stored[name]
            if shadow.shape != full_shape(weight):
                raise ValueError(
                    f"EMA: {name!r} has shape {tuple(shadow.shape)} in the checkpoint and "
                    f"{tuple(full_shape(weight))} in the model; resume with the model of that run"
                )
            self.shadows[name] = self._kept(weight, part_of(weight, shadow))

    def _kept(self, weight: nn.Parameter, part: Tensor) -> Tensor:
        return part.to(self.device or weight.device, torch.float32, copy=True)


def _refuse_rounded_weights(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Refuse to average the 16-bit copy that DeepSpeed makes of the 32-bit weights it trains."""
    if not isinstance(trainer.strategy, DeepSpeedStrategy):
        return
    for name, weight in trainable_weights(module).items():
        if weight.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"EMA would average {name} as DeepSpeed rounds it to {weight.dtype}, in which most "
                "updates vanish; take trainer.strategy fsdp2, which keeps float32 weights under "
                "bf16-mixed too, or remove EMA from trainer.callbacks"
            )


def trainable_weights(module: L.LightningModule) -> dict[str, nn.Parameter]:
    """Parameters of the trainable models that receive gradients, each once, by role and name."""
    if not isinstance(module, Exportable):
        raise ValueError(
            f"EMA needs trainable_models() and {type(module).__name__} has none; "
            "remove EMA from trainer.callbacks"
        )
    weights: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for role, model in module.trainable_models().items():
        reshard(model)
        for name, weight in model.named_parameters():
            # a policy and a critic may share a backbone
            if not weight.requires_grad or id(weight) in seen:
                continue
            seen.add(id(weight))
            weights[f"{role}.{name}"] = weight
    return weights
