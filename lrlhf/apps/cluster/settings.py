"""What a run takes of a Ray cluster: the file that ``lrlhf launch --cluster`` reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one process of a kind takes of the node that it is put on."""

    cpus: float = 1
    """Cores; also the threads that a trainer or a reward worker computes with."""
    gpus: float = 0
    """GPUs."""
    resources: dict[str, float] = field(default_factory=dict)
    """Resources of your own cluster, by the names that its nodes were started with."""

    def __post_init__(self) -> None:
        for name, value in self.bundle().items():
            if value < 0:
                raise ValueError(f"{name} is {value}; it must not be below 0")

    def bundle(self) -> dict[str, float]:
        """Return it as Ray writes the bundle of a placement group."""
        return {"CPU": self.cpus, "GPU": self.gpus, **self.resources}


@dataclass(frozen=True, kw_only=True)
class Trainers(Share):
    """The processes of ``lrlhf fit``, one per GPU."""

    workers: int = 1
    """How many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count("trainers.workers", self.workers, 1)
        if self.gpus not in (0, 1):
            raise ValueError(f"trainers.gpus is {self.gpus}; each process has 1 GPU, or 0")


@dataclass(frozen=True, kw_only=True)
class Rollouts(Share):
    """The vLLM servers of a `lrlhf.rollout.VLLMServerEngine`."""

    replicas: int = 0
    """How many; 0: rank 0 starts its own, on its node."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count("rollouts.replicas", self.replicas, 0)


@dataclass(frozen=True, kw_only=True)
class RewardWorkers(Share):
    """Processes that score responses with the reward functions of the run."""

    workers: int = 0
    """How many; 0: each trainer scores its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count("rewards.workers", self.workers, 0)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A Ray cluster, and what a run takes of it."""

    address: str | None = "auto"
    """``auto``: the cluster that this machine belongs to; HOST:PORT of the head node's GCS; null:
    start one on this machine, which ends with the run."""
    trainers: Trainers = field(default_factory=Trainers)
    rollouts: Rollouts = field(default_factory=Rollouts)
    rewards: RewardWorkers = field(default_factory=RewardWorkers)
    max_failures: int = 3
    """How often the trainers are started again after one, or what watches over them, was lost; -1:
    always."""
    storage: str | None = None
    """Folder that all nodes share, where the trainers work and relative paths of the config start.
    null: the folder in which ``lrlhf launch`` was called."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of all processes of the run, on all nodes."""

    def __post_init__(self) -> None:
        if self.address is not None and "://" in self.address:
            raise ValueError(
                f"address is {self.address!r}, and Ray Client ends a run with its connection: call "
                "lrlhf launch on a node of the cluster, or through ray job submit, with auto"
            )
        _check_count("max_failures", self.max_failures, -1)
        if self.storage is not None and not Path(self.storage).is_dir():
            raise ValueError(f"storage is {self.storage!r}, and there is no such folder here")

    def bundles(self) -> dict[str, list[dict[str, float]]]:
        """Return what is placed beside the trainers: the name of a group, and its bundles."""
        return {
            "rollouts": [self.rollouts.bundle()] * self.rollouts.replicas,
            "rewards": [self.rewards.bundle()] * self.rewards.workers,
        }

    def total(self) -> dict[str, float]:
        """Return what all of it takes together, of each resource."""
        total: dict[str, float] = {}
        all_bundles = [bundle for bundles in self.bundles().values() for bundle in bundles]
        for bundle in [self.trainers.bundle()] * self.trainers.workers + all_bundles:
            for name, amount in bundle.items():
                total[name] = total.get(name, 0) + amount
        return total

    def missing(self, there: Mapping[str, float]) -> str:
        """Say what it takes more of than there is; empty: of nothing."""
        return ", ".join(
            f"{amount:g} {name} (there {there.get(name, 0):g})"
            for name, amount in self.total().items()
            if amount > there.get(name, 0)
        )


def _check_count(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}; it must be {least} or more")
