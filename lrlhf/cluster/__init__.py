"""Runs on more than one node, by Ray: the extra ``ray``, and ``lrlhf launch``."""

from lrlhf.cluster.replicas import RayServerEngine
from lrlhf.cluster.rewards import RayRewards
from lrlhf.cluster.settings import Cluster, RewardWorkers, Rollouts, Trainers

__all__ = ["Cluster", "RayRewards", "RayServerEngine", "RewardWorkers", "Rollouts", "Trainers"]
