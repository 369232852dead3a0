"""Parameters that take no part in a backward pass, and the strategies that mind."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from lrlhf.run.lightning_internals import looks_for_unused_parameters
from lrlhf.run.split_models import SplitsModels


def waits_for_every_parameter(trainer: L.Trainer) -> bool:
    """Tell whether a backward pass that leaves trainable parameters out would stop the run.

    DistributedDataParallel waits for the gradient of each, unless it was told to look for those
    that are unused.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy) or isinstance(strategy, SplitsModels):
        return False
    return not looks_for_unused_parameters(strategy)


def minds_idle_parts(trainer: L.Trainer) -> bool:
    """Tell whether a part of a model that takes part on some ranks only would stop the run.

    DeepSpeed fills buckets with gradients as they come, on every rank its own.
    """
    several = trainer.world_size > 1 and isinstance(trainer.strategy, DeepSpeedStrategy)
    return several or waits_for_every_parameter(trainer)
