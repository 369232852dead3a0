"""The algorithms as LightningModules: wiring, logging, optimizers."""

from typing import TYPE_CHECKING

from lrlhf.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lrlhf.guard import DumpReplay, Guard, NotADumpError, TrainingDivergedError, replay_dump
    from lrlhf.modules.base import TrainingModule
    from lrlhf.modules.contracts import Exportable, KLPenalized, SamplesResponses
    from lrlhf.modules.dpo import DPO
    from lrlhf.modules.kto import KTO
    from lrlhf.modules.optimizers import OptimizerConfig
    from lrlhf.modules.policy.generate import Sampled
    from lrlhf.modules.policy_module import PolicyModule
    from lrlhf.modules.ppo import PPO
    from lrlhf.modules.process_reward_model import ProcessRewardModel
    from lrlhf.modules.reward_model import RewardModel
    from lrlhf.modules.rloo import RLOO
    from lrlhf.modules.settings import (
        Advantage,
        Critic,
        DynamicSampling,
        Evaluation,
        ImportanceSampling,
        Reference,
        Teacher,
        Update,
    )
    from lrlhf.modules.sft import SFT
else:
    __getattr__ = lazy_exports(__name__)


__all__ = [
    "DPO",
    "KTO",
    "PPO",
    "RLOO",
    "SFT",
    "Advantage",
    "Critic",
    "DumpReplay",
    "DynamicSampling",
    "Evaluation",
    "Exportable",
    "Guard",
    "ImportanceSampling",
    "KLPenalized",
    "NotADumpError",
    "OptimizerConfig",
    "PolicyModule",
    "ProcessRewardModel",
    "Reference",
    "RewardModel",
    "Sampled",
    "SamplesResponses",
    "Teacher",
    "TrainingDivergedError",
    "TrainingModule",
    "Update",
    "replay_dump",
]
