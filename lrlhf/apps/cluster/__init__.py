"""Runs on more than one node, by Ray: the extra ``ray``, and ``lrlhf launch``.

Ray's workers import this package, so it imports no more than they need:
`lrlhf.apps.cluster.rewards` and `lrlhf.apps.cluster.replicas` are imported where they are used.
"""

from lrlhf.apps.cluster.settings import Cluster, RewardWorkers, Rollouts, Trainers

__all__ = ["Cluster", "RewardWorkers", "Rollouts", "Trainers"]
