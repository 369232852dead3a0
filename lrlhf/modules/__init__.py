"""The algorithms as LightningModules: wiring, logging, optimizers."""

from lrlhf.modules.contracts import Exportable, KLPenalized
from lrlhf.modules.dump import NotADumpError
from lrlhf.modules.dump_replay import DumpReplay, replay_dump
from lrlhf.modules.guard import Guard, TrainingDivergedError
from lrlhf.modules.importance import ImportanceSampling
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.policy_module import PolicyModule
from lrlhf.modules.ppo import PPO
from lrlhf.modules.reward_model import RewardModel
from lrlhf.modules.rloo import RLOO
from lrlhf.modules.settings import Advantage, Critic, DynamicSampling, Reference, Update

__all__ = [
    "PPO",
    "RLOO",
    "Advantage",
    "Critic",
    "DumpReplay",
    "DynamicSampling",
    "Exportable",
    "Guard",
    "ImportanceSampling",
    "KLPenalized",
    "NotADumpError",
    "OptimizerConfig",
    "PolicyModule",
    "Reference",
    "RewardModel",
    "TrainingDivergedError",
    "Update",
    "replay_dump",
]
