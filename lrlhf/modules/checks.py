"""Settings that cannot work, said before they cost an iteration."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from torch import nn
from transformers import PreTrainedModel

from lrlhf.media import MediaProcessor
from lrlhf.models import media_modules, placeholder_ids
from lrlhf.models.sharding import CheckpointMismatchError, check_same_names
from lrlhf.run import (
    SplitsModels,
    keep_host_memory,
    minds_idle_parts,
    resume_where_it_stopped,
    trainer_of,
    use_atomic_checkpoints,
    watch_over,
)
from lrlhf.run.lightning_internals import has_callback
from lrlhf.run.log_rows import keep_log_rows


def refuse_pure_low_precision(trainer: L.Trainer, model: nn.Module) -> None:
    """Refuse 16-bit weights without a 32-bit master copy.

    At the learning rates of reinforcement learning most updates are smaller than half a unit in
    the last place of a bfloat16 weight and vanish: at 1e-6, 98 of 100 weights never change.

    Args:
        trainer: Its precision may cast the weights.
        model: Its trained weights may be 16 bits wide already.

    Raises:
        ValueError: The only copy of a trained weight has 16 bits.
    """
    plain = isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy)
    # DeepSpeed moves a copy in 32 bits
    plain = plain and not isinstance(trainer.strategy, DeepSpeedStrategy)
    if plain and trainer.precision in ("bf16-true", "16-true"):
        raise ValueError(
            f"trainer.precision is {trainer.precision}: updates at usual learning rates "
            "would be rounded away; use bf16-mixed, which computes in "
            "bfloat16 and keeps the weights in float32"
        )
    for name, parameter in model.named_parameters() if plain else ():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"the trained weight {name} is {parameter.dtype}: updates at usual learning rates "
                "would be rounded away; load the model with dtype: float32 and compute in 16 bits "
                "with trainer.precision: bf16-mixed, or train a LoRA adapter"
            )


def prepare_trainer(trainer: L.Trainer, stage: str) -> None:
    """Have a trainer save, split and end as these modules need it; from their ``setup``.

    Raises:
        ValueError: Its strategy is one of Lightning's that split a module as one model.
    """
    use_atomic_checkpoints(trainer)
    refuse_other_splitting(trainer)
    keep_log_rows(trainer, stage)
    if stage == "fit":
        watch_over(trainer)
        resume_where_it_stopped(trainer)
        if trainer.strategy.root_device.type == "cpu":
            keep_host_memory()  # given back by the watch, however the fit ends


def refuse_rate_finder(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Refuse Lightning's search for a learning rate where it would see no loss.

    Raises:
        ValueError: The module takes its optimizer steps itself and returns no loss.
    """
    if has_callback(trainer, LearningRateFinder):
        raise ValueError(
            f"{type(module).__name__} takes its optimizer steps itself and returns no loss, by "
            "which LearningRateFinder and Tuner.lr_find compare learning rates; set "
            "model.optimizer.lr and compare short runs"
        )


def refuse_batch_size_finder(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Refuse Lightning's search for a batch size where a step does more than train on a batch.

    Raises:
        ValueError: The search is configured.
    """
    if has_callback(trainer, BatchSizeFinder):
        raise ValueError(
            f"a step of {type(module).__name__} generates and scores before it trains, so "
            "BatchSizeFinder and Tuner.scale_batch_size would try whole iterations; "
            "model.update.micro_batch_tokens bounds the memory of an update whatever the batch "
            "size, and lrlhf plan computes what fits"
        )


def refuse_other_splitting(trainer: L.Trainer) -> None:
    """Refuse Lightning's own ways to split a model, which do not know of several models.

    Raises:
        ValueError: One of them is configured; names the one to take instead.
    """
    strategy = trainer.strategy
    if isinstance(strategy, SplitsModels):
        return
    if isinstance(strategy, FSDPStrategy):
        raise ValueError(
            "trainer.strategy fsdp is PyTorch's first FSDP, which cannot carry two models whose "
            "losses are run backward one after the other; use fsdp2"
        )
    if isinstance(strategy, ModelParallelStrategy):
        raise ValueError(
            "trainer.strategy ModelParallelStrategy leaves it to the module to split its models, "
            "and these modules do not; use fsdp2"
        )
    if isinstance(strategy, DeepSpeedStrategy):
        raise ValueError(
            f"trainer.strategy {strategy.strategy_name} is Lightning's DeepSpeed, which has one "
            "engine for the whole module; use deepspeed_zero1, deepspeed_zero2 or deepspeed_zero3"
        )


def refuse_other_weights(module: L.LightningModule, checkpoint: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another model before torch lists every weight of it.

    Where a strategy splits the models, it compares them itself.

    Raises:
        CheckpointMismatchError: Names or shapes of weights differ; names the first.
    """
    trainer = trainer_of(module)
    if "state_dict" not in checkpoint or (trainer and isinstance(trainer.strategy, SplitsModels)):
        return
    stored, own = checkpoint["state_dict"], module.state_dict()
    check_same_names("the checkpoint", stored, own)
    others = [name for name, weight in own.items() if weight.shape != stored[name].shape]
    if others:
        then, now = (list(weights[others[0]].shape) for weights in (stored, own))
        raise CheckpointMismatchError(
            f"{len(others)} of {len(own)} weights have another shape in the checkpoint, the first "
            f"is {others[0]}: {then} there, {now} in this model; resume with the model that the "
            "run was started with"
        )


def refuse_idle_encoder(
    trainer: L.Trainer, model: PreTrainedModel, processor: MediaProcessor | None
) -> None:
    """Refuse a strategy that hangs when only some ranks show media to an encoder that learns.

    Raises:
        ValueError: Gradients of the encoder are waited for on ranks whose rows show nothing.
    """
    if processor is None or not minds_idle_parts(trainer):
        return
    parts = {id(part) for part in media_modules(model)}
    learning = [
        name
        for name, part in model.base_model.named_children()
        if id(part) in parts and any(weight.requires_grad for weight in part.parameters())
    ]
    if learning:
        sees = "image" in placeholder_ids(model.config)
        how = "freeze_vision: true, and freeze for what fits it to the language model"
        how = how if sees else f"freeze: [{', '.join(learning)}]"
        raise ValueError(
            "the encoder of images or audio is trained, and this strategy waits for its gradients "
            "also where a process has rows without them: use trainer.strategy: "
            f"ddp_find_unused_parameters_true or fsdp2, or freeze it ({how})"
        )


def uses_loss_scaler(trainer: L.Trainer) -> bool:
    """Tell whether a loss scaler looks for its scale: by overflowing, which is no divergence."""
    plugin = trainer.precision_plugin
    return isinstance(plugin, MixedPrecision) and plugin.scaler is not None


def refuse_other_batch(
    module: L.LightningModule, batch: object, kind: type | UnionType, data_module: str
) -> None:
    """Refuse what a loader of the user's gives instead of a batch of a data module.

    Raises:
        ValueError: It is none; names the data module to take.
    """
    if not isinstance(batch, kind):
        name = type(module).__name__
        raise ValueError(
            f"{name} got a {type(batch).__name__} for a batch, and needs those of {data_module}: "
            f"trainer.fit(module, {data_module}(train=rows, batch_size=8)) takes rows as they are"
        )
