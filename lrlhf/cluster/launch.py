"""Runs ``lrlhf fit`` on a Ray cluster, and takes down all that it has put there."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from lrlhf.background import in_background
from lrlhf.cluster.connection import asked_to_end, connect
from lrlhf.cluster.rewards import NAME, RewardWorker
from lrlhf.cluster.settings import Cluster
from lrlhf.cluster.trainers import BOARD, TERMINATED, Board, Command, trainers

_SILENCE_SECONDS = 15.0
"""Without a look at the board after which no trainer runs that could end by itself."""
_INTERRUPTED = 130
_KEPT: dict[str, Any] = {"max_restarts": -1, "max_task_retries": -1}
"""Of actors that are started again where they die, and are asked once more."""
logger = logging.getLogger(__name__)


class LaunchError(RuntimeError):
    """The trainers were lost more often than ``max_failures`` allows."""


@dataclass(frozen=True)
class Run:
    """What is launched."""

    arguments: Sequence[str]
    """Of ``lrlhf``, for every trainer."""
    folder: str
    """Of the run."""
    rewards: bytes | None = None
    """Pickled `lrlhf.rewards.Rewards` for the reward workers; None: there are none."""
    code: Sequence[str] = ()
    """Folders of the user's code."""


def launch(cluster: Cluster, run: Run) -> int:
    """Run the trainers, the rollout replicas and the reward workers until the run is through.

    Returns:
        The exit status: that of rank 0's trainer; 143 or 130 after SIGTERM or Ctrl-C.

    Raises:
        LaunchError: A trainer was lost more often than allowed.
        KeyboardInterrupt: A second signal came.
    """
    namespace = f"lrlhf-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    ray = connect(lambda ray: ray.init(namespace=namespace, **_cluster_options(cluster)))
    try:
        with asked_to_end() as asked, _placed(ray, cluster) as groups:
            board = ray.remote(num_cpus=0)(Board).options(name=BOARD, **_KEPT).remote()
            workers = _reward_workers(ray, cluster, run, groups)
            command = Command(
                arguments=run.arguments,
                folder=str(Path(cluster.storage or Path.cwd()).absolute()),
                run_folder=run.folder,
                address=ray.get_runtime_context().gcs_address,
                namespace=namespace,
            )
            fitting = in_background(trainers(cluster, command).fit, name="ray-train")
            status = _await(ray, fitting.done, board, asked)
            del workers  # an actor ends with the last handle to it
            if status is None:
                status = _status(cluster, fitting.result)
        return _INTERRUPTED if asked[:1] == [signal.SIGINT] and status == TERMINATED else status
    finally:
        ray.shutdown()


def _cluster_options(cluster: Cluster) -> dict[str, Any]:
    """Return what ``ray.init`` is told of the cluster."""
    if cluster.address is not None:
        return {"address": cluster.address}
    # cores are what Ray counts with, not what there is: a trial may share them
    cores = max(os.cpu_count() or 1, round(cluster.cpus() + 0.5))
    return {"address": "local", "num_cpus": cores}


@contextmanager
def _placed(ray: Any, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Reserve room for what runs beside the trainers: a placement group of each kind."""
    groups = {
        name: ray.util.placement_group(
            [{kind: amount for kind, amount in bundle.items() if amount} for bundle in bundles],
            name=name,
        )
        for name, bundles in cluster.bundles().items()
        if bundles
    }
    try:
        yield groups
    finally:
        for group in groups.values():
            ray.util.remove_placement_group(group)


def _reward_workers(ray: Any, cluster: Cluster, run: Run, groups: dict[str, Any]) -> list[Any]:
    """Start the reward workers; they end when nobody holds them."""
    strategies = import_module("ray.util.scheduling_strategies")
    share = cluster.rewards
    return [
        ray.remote(RewardWorker)
        .options(
            name=f"{NAME}{number:03}",
            num_cpus=share.cpus,
            num_gpus=share.gpus,
            resources=share.resources,
            **_KEPT,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                groups["rewards"], placement_group_bundle_index=number
            ),
        )
        .remote(run.rewards, list(run.code))
        for number in range(share.workers)
    ]


def _await(ray: Any, done: Callable[[], bool], board: Any, asked: list[int]) -> int | None:
    """Wait for the trainers; None: they are through, else the status to end with at once."""
    while not done() and not asked:
        time.sleep(0.2)
    if done():
        return None
    logger.info("asked to end: the trainers finish their step and save; once more ends at once")
    looks, heard = -1, time.monotonic()
    while not done():
        # again and again, as an actor that was started again has heard of nothing
        if (now := ray.get(board.ask_to_end.remote())) != looks:
            looks, heard = now, time.monotonic()
        if time.monotonic() - heard > _SILENCE_SECONDS:
            return TERMINATED
        time.sleep(0.2)
    return None


def _status(cluster: Cluster, result: Callable[[], Any]) -> int:
    """Return the exit status of rank 0's trainer."""
    try:
        return int(result().return_value)
    except import_module("ray.train").TrainingFailedError as error:
        *_, reason = str(error).strip().splitlines()
        raise LaunchError(
            f"the trainers were started again {cluster.max_failures} times (max_failures of the "
            f"cluster), and one was lost once more: {reason.strip()}"
        ) from error
