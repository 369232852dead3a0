"""The trainers of a run: ``lrlhf fit`` in processes that Ray Train places and starts again."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from lrlhf.cluster.connection import ADDRESS, NAMESPACE, free_place, import_ray
from lrlhf.cluster.guarded import GuardedProgram
from lrlhf.cluster.settings import Cluster

BOARD: Final = "board"
TERMINATED: Final = 128 + signal.SIGTERM
"""Exit status of a trainer that was asked to end, see `lrlhf.run.supervision.signals`."""
_REFUSED = 2
"""Exit status of a command whose config is wrong: to start it again changes nothing."""
_LOOK_SECONDS = 1.0


class TrainerLostError(RuntimeError):
    """A trainer ended before its run did."""


@dataclass(frozen=True)
class Command:
    """What every trainer runs, and where it finds the rest of the run."""

    arguments: Sequence[str]
    """Of ``lrlhf``."""
    folder: str
    """That it works in."""
    run_folder: str
    """Where Ray Train notes its progress."""
    address: str
    """Of the cluster."""
    namespace: str
    """Of the actors of the run."""


class Board:
    """An actor that trainers look at every second: whether they are asked to end."""

    def __init__(self) -> None:
        self._asked = False
        self._looks = 0

    def ask_to_end(self) -> int:
        """Ask all trainers to end after their step; returns how often one has looked."""
        self._asked = True
        return self._looks

    def look(self) -> bool:
        """Tell a trainer whether it is asked to end."""
        self._looks += 1
        return self._asked


def trainers(cluster: Cluster, command: Command) -> Any:
    """Return the Ray Train trainer whose ``fit`` runs the command on all workers.

    Its backend is the plain one, which sets up nothing: Lightning makes the process group, as the
    strategy of the config wants it.
    """
    train = import_module("ray.train")
    parallel = import_module("ray.train.v2.api.data_parallel_trainer").DataParallelTrainer
    share = cluster.trainers
    bundle = {name: amount for name, amount in share.bundle().items() if amount}
    return parallel(
        run_one,
        train_loop_config={"command": command},
        scaling_config=train.ScalingConfig(
            num_workers=share.workers, use_gpu=share.gpus > 0, resources_per_worker=bundle
        ),
        run_config=train.RunConfig(
            name=command.namespace,
            storage_path=str(Path(command.folder, command.run_folder, "ray")),
            failure_config=train.FailureConfig(max_failures=cluster.max_failures),
        ),
    )


def run_one(config: dict[str, Any]) -> int:
    """Run one trainer in a process of its own, and wait for it.

    Ray Train calls this in a thread of its worker, where no signal handler can be set; a process
    has a main thread for them, and starts without Ray's own state.

    Returns:
        Its exit status: it is through, was asked to end, or refused its config.

    Raises:
        TrainerLostError: It ended otherwise; Ray Train then starts all of them again.
    """
    command: Command = config["command"]
    train = import_module("ray.train")
    ray = import_ray()
    context = train.get_context()
    rank = context.get_world_rank()
    place = import_module("ray.train.collective").broadcast_from_rank_zero(
        free_place() if rank == 0 else None
    )
    board = ray.get_actor(BOARD, namespace=command.namespace)
    if ray.get(board.look.remote()):
        return TERMINATED
    program = GuardedProgram(
        [sys.executable, "-m", "lrlhf", *command.arguments],
        env=_environment(command, rank, context.get_world_size(), place),
        folder=Path(command.folder),
    )
    status = _attend(program, board)
    if status in (0, _REFUSED, TERMINATED):
        return status
    raise TrainerLostError(f"the trainer of rank {rank} ended with status {status}")


def _attend(program: GuardedProgram, board: Any) -> int:
    """Wait for a program, and pass on once that it is asked to end."""
    ray = import_ray()
    asked = False
    while (status := program.wait(_LOOK_SECONDS)) is None:
        if ray.get(board.look.remote()) and not asked:
            asked = True
            program.ask_to_end()
    return status


def _environment(command: Command, rank: int, size: int, place: tuple[str, int]) -> dict[str, str]:
    """Return the environment of a trainer: its worker's, with the ranks as torchrun sets them.

    Each worker sees only its own GPU and counts as a machine with one process, so that Ray may
    place them as they fit.
    """
    # a Ray cluster inside a SLURM job: the ranks of its tasks are not those of the trainers
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return own | {
        "TORCHELASTIC_RUN_ID": command.namespace,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "GROUP_RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": place[0],
        "MASTER_PORT": str(place[1]),
        ADDRESS: command.address,
        NAMESPACE: command.namespace,
    }
