"""The algorithms as LightningModules: wiring, logging, optimizers."""

from lrlhf.modules.contracts import Exportable, KLPenalized
from lrlhf.modules.importance import ImportanceSampling
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.policy_module import PolicyModule
from lrlhf.modules.ppo import PPO
from lrlhf.modules.reward_model import RewardModel, TrainingDivergedError
from lrlhf.modules.rloo import RLOO
from lrlhf.modules.settings import Advantage, Critic, DynamicSampling, Reference, Update

__all__ = [
    "PPO",
    "RLOO",
    "Advantage",
    "Critic",
    "DynamicSampling",
    "Exportable",
    "ImportanceSampling",
    "KLPenalized",
    "OptimizerConfig",
    "PolicyModule",
    "Reference",
    "RewardModel",
    "TrainingDivergedError",
    "Update",
]
