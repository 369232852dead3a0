"""Runs on more than one node, by Ray: the extra ``ray``, and ``lrlhf launch``."""

from lrlhf.cluster.rewards import RayRewards
from lrlhf.cluster.settings import Cluster, Rollouts, RewardWorkers, Trainers

__all__ = ["Cluster", "RayRewards", "RewardWorkers", "Rollouts", "Trainers"]
