"""Runs on more than one node, by Ray: the extra ``ray``, and ``lrlhf launch``.

Ray's workers import this package, so it imports no more than they need: `lrlhf.cluster.rewards`
and `lrlhf.cluster.replicas` are imported where they are used.
"""

from lrlhf.cluster.settings import Cluster, RewardWorkers, Rollouts, Trainers

__all__ = ["Cluster", "RewardWorkers", "Rollouts", "Trainers"]
