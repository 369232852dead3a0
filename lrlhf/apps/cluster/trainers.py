"""The trainers of a run: ``lrlhf fit`` in processes that Ray Train places and starts again."""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from lrlhf.apps.cluster.connection import ADDRESS, ENVIRONMENT, NO_GPUS, free_place, import_ray
from lrlhf.apps.cluster.guarded_program import GuardedProgram
from lrlhf.apps.cluster.settings import Cluster
from lrlhf.cli.command_table import LAUNCHED

STATUS: Final = "board"
TERMINATED: Final = 128 + signal.SIGTERM
"""Exit status of a trainer that was asked to end, see `lrlhf.run.supervision.signals`."""
_REFUSED = 2
"""Exit status of a command whose config is wrong: to start it again changes nothing."""
_LOOK_SECONDS = 1.0
_OTHERS_SECONDS: dict[int, float] = {_REFUSED: 10.0, TERMINATED: 60.0, 0: 1800.0}
"""How long trainers may go on when another one has ended with such a status. Those of a refused
config may wait for each other; that of rank 0 may write what the others have given it."""
FOLDER_WAIT: Final = "LRLHF_FOLDER_WAIT"
"""As in `lrlhf.run.run_folder`, which imports Lightning, and Ray's workers this module."""
FOLDER_SECONDS: Final = 180
"""How long a trainer waits for a folder: a file server keeps the lock of a node that was lost."""


class TrainerLostError(RuntimeError):
    """A trainer ended before its run did."""


@dataclass(frozen=True)
class TrainerCommand:
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
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of all processes of the run."""
    on_gpus: bool = False
    """Whether each trainer has one."""


class TrainerStatus:
    """An actor that trainers look at every second.

    It knows whether they are asked to end, how often all of them were started, and how the first of
    each such attempt has ended.

    Args:
        notes: File that keeps this for an actor that is started again, which is then asked to end
            once more.
    """

    def __init__(self, notes: str) -> None:
        self._ending = False
        self._looks = 0
        self._notes = Path(notes)
        self._ended: dict[str, int | None] = {}
        if self._notes.exists():
            self._ended = json.loads(self._notes.read_text())

    def ask_to_end(self) -> int:
        """Ask all trainers to end after their step; returns how often one has looked."""
        self._ending = True
        return self._looks

    def looks(self) -> int:
        """Return how often a trainer has looked."""
        return self._looks

    def look(self, attempt: str) -> tuple[bool, int | None]:
        """Tell a trainer whether it is asked to end, and the first status of its attempt."""
        self._looks += 1
        if attempt not in self._ended:
            self._note(attempt, None)
        return self._ending, self._ended.get(attempt)

    def end(self, attempt: str, status: int) -> None:
        """Note that a trainer has ended with a status for which none is started again."""
        if self._ended.get(attempt) is None:
            self._note(attempt, status)

    def attempts(self) -> int:
        """Return how often trainers were started."""
        return len(self._ended)

    def _note(self, attempt: str, status: int | None) -> None:
        self._ended[attempt] = status
        self._notes.parent.mkdir(parents=True, exist_ok=True)
        new = self._notes.with_suffix(".new")
        new.write_text(json.dumps(self._ended))
        new.replace(self._notes)  # whole or not at all


def trainers(cluster: Cluster, command: TrainerCommand) -> Any:
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
    command: TrainerCommand = config["command"]
    train = import_module("ray.train")
    ray = import_ray()
    context = train.get_context()
    rank = context.get_world_rank()
    address, attempt = import_module("ray.train.collective").broadcast_from_rank_zero(
        (free_place(), secrets.token_hex(4)) if rank == 0 else None
    )
    actor = ray.get_actor(STATUS, namespace=command.namespace)

    def look() -> tuple[bool, int | None]:
        ending, ended = ray.get(actor.look.remote(attempt))
        return ending, ended

    if look()[0]:
        return TERMINATED
    program = GuardedProgram(
        [sys.executable, "-m", "lrlhf", *command.arguments],
        env=_environment(command, rank, context.get_world_size(), address),
        folder=Path(command.folder),
    )
    status = _wait_for_program(program, look)
    if status in _OTHERS_SECONDS:
        ray.get(actor.end.remote(attempt, status))
        return status
    raise TrainerLostError(f"the trainer of rank {rank} ended with status {status}")


def _wait_for_program(program: GuardedProgram, look: Callable[[], tuple[bool, int | None]]) -> int:
    """Wait for a program, pass on once that it is asked to end, and end it after the others.

    Raises:
        TrainerLostError: The others are through, and it does not end.
    """
    passed_on, until = False, math.inf
    while (status := program.wait(_LOOK_SECONDS)) is None:
        ending, first = look()
        if ending and not passed_on:
            passed_on = program.ask_to_end()
        if first is None:
            continue
        until = min(until, time.monotonic() + _OTHERS_SECONDS[first])
        if time.monotonic() >= until:
            program.stop()
            if first == 0:
                raise TrainerLostError("a trainer does not end, though another one is through")
            return first
    return status


def _environment(
    command: TrainerCommand, rank: int, size: int, address: tuple[str, int]
) -> dict[str, str]:
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
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
        ADDRESS: command.address,
        LAUNCHED: command.namespace,
        ENVIRONMENT: json.dumps(dict(command.environment)),
        FOLDER_WAIT: str(FOLDER_SECONDS),
        **({} if command.on_gpus else NO_GPUS),
        **command.environment,
    }
