"""The algorithms as LightningModules: wiring, logging, optimizers."""

from lrlhf.modules.contracts import Exportable, KLPenalized
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.reward_model import RewardModel, TrainingDivergedError
from lrlhf.modules.rloo import RLOO
from lrlhf.modules.settings import Advantage, Reference, Update

__all__ = [
    "RLOO",
    "Advantage",
    "Exportable",
    "KLPenalized",
    "OptimizerConfig",
    "Reference",
    "RewardModel",
    "TrainingDivergedError",
    "Update",
]
