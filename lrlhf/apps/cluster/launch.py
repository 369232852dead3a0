"""Runs ``lrlhf fit`` on a Ray cluster, and takes down all that it has put there."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import pickle
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lrlhf.apps.cluster.connection import (
    NO_GPUS,
    RayMissingError,
    connect,
    import_ray,
    with_environment,
)
from lrlhf.apps.cluster.replicas import RayServerEngine
from lrlhf.apps.cluster.rewards import NAME, RETRIES, RayRewards, RewardWorker
from lrlhf.apps.cluster.settings import Cluster
from lrlhf.apps.cluster.trainers import STATUS, TERMINATED, TrainerCommand, TrainerStatus, trainers
from lrlhf.background import in_background
from lrlhf.cli.application import Application
from lrlhf.cli.config_entries import class_of, options_of
from lrlhf.cli.config_files import (
    config_arguments,
    folders_of_own_code,
    is_inline,
    read_config_files,
)
from lrlhf.noted_signals import noted_signals
from lrlhf.options.errors import ConfigError, MistakeError
from lrlhf.options.parser import Parser
from lrlhf.rewards import Rewards
from lrlhf.rollout import VLLMServerEngine

_SILENCE_SECONDS = 15.0
"""Without a look at the board after which no trainer runs that could end by itself."""
_INTERRUPTED = 130
_UNPLACED_SECONDS = 60.0
"""Without a trainer that runs after which the log says what waits for room."""
logger = logging.getLogger(__name__)


class LaunchError(RuntimeError):
    """There is no cluster for a run, or it was lost more often than ``max_failures`` allows."""


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
        LaunchError: There is no such cluster, or what the run takes can never be there; a trainer,
            or what watches over them, was lost more often than allowed.
        KeyboardInterrupt: A second signal came.
    """
    namespace = f"lrlhf-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    ray = _connected(cluster, namespace)
    try:
        _check_room(cluster, ray.cluster_resources())
        with noted_signals(second_interrupts=True) as signals, _placed(ray, cluster) as groups:
            workers = _reward_workers(ray, cluster, run, groups)
            folder = Path(cluster.storage or Path.cwd()).absolute()
            actor = _board_actor(ray, folder / run.folder / "ray" / f"{namespace}.json")
            command = TrainerCommand(
                arguments=run.arguments,
                folder=str(folder),
                run_folder=run.folder,
                address=ray.get_runtime_context().gcs_address,
                namespace=namespace,
                environment=cluster.environment,
                on_gpus=cluster.trainers.gpus > 0,
            )
            fitting = in_background(lambda: _fitted(ray, cluster, command, actor), name="ray-train")
            _await_start(ray, fitting.done, actor, signals, lambda: _waiting(ray, cluster, groups))
            status = _await(ray, fitting.done, actor, signals)
            del workers  # an actor ends with the last handle to it
            if status is None:
                status = _status(cluster, fitting.result)
        return _INTERRUPTED if signals[:1] == [signal.SIGINT] and status == TERMINATED else status
    finally:
        ray.shutdown()


def _connected(cluster: Cluster, namespace: str) -> Any:
    try:
        return connect(
            lambda ray: ray.init(
                namespace=namespace,
                **_cluster_options(cluster),
                **with_environment(cluster.environment),
            )
        )
    except ConnectionError as error:
        raise LaunchError(
            f"there is no Ray cluster at address {cluster.address}: start one by ray start --head, "
            "or have one started on this machine for the run by --cluster.address null"
        ) from error


def _check_room(cluster: Cluster, there: Mapping[str, float]) -> None:
    """Say what a cluster lacks, which waits for nodes that join it.

    Raises:
        LaunchError: None can join.
    """
    if not (missing := cluster.missing(there)):
        return
    if cluster.address is None:
        raise LaunchError(f"the run takes {missing}, and no node joins a cluster of one machine")
    logger.warning("the run takes %s: it waits until nodes with that join the cluster", missing)


def _board_actor(ray: Any, notes: Path) -> Any:
    # started again where it dies, and asked once more
    restarts = {"max_restarts": -1, "max_task_retries": -1}
    strategies = import_module("ray.util.scheduling_strategies")
    # on this node, which can write to the run's folder, and without which the run ends anyway
    here = strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=True
    )
    actor = ray.remote(num_cpus=0)(TrainerStatus)
    return actor.options(name=STATUS, scheduling_strategy=here, **restarts).remote(str(notes))


def _fitted(ray: Any, cluster: Cluster, command: TrainerCommand, actor: Any) -> Any:
    """Run the trainers, again where what watches over them is lost, which forgets its count."""
    most = left = cluster.max_failures
    for lost in itertools.count(1):
        try:
            return trainers(replace(cluster, max_failures=left), command).fit()
        except ray.exceptions.RayActorError as error:
            # one that was lost before it had started any counts too
            started = max(lost, ray.get(actor.attempts.remote()))
            if 0 <= most < started:
                raise LaunchError(
                    f"Ray Train's controller was lost after the trainers were started again "
                    f"{started - 1} times, and max_failures of the cluster is {most}"
                ) from error
            left = most if most < 0 else most - started
            logger.warning("Ray Train's controller was lost: the trainers are started again")
    raise AssertionError


def _await_start(
    ray: Any,
    done: Callable[[], bool],
    actor: Any,
    signals: Sequence[int],
    waiting: Callable[[], Sequence[str]],
) -> None:
    """Wait for the first trainer, and say what waits for room where none comes."""
    deadline, looked = time.monotonic() + _UNPLACED_SECONDS, 0
    while not (done() or signals or looked or time.monotonic() > deadline):
        time.sleep(0.2)
        looked = ray.get(actor.looks.remote())
    if done() or signals or looked:
        return
    free = ", ".join(
        f"{name} {amount:g}"
        for name, amount in sorted(ray.available_resources().items())
        if "_group_" not in name and not name.startswith("node:") and "memory" not in name
    )
    logger.warning(
        "no trainer runs after %g s; waiting for room: %s; free on all nodes together: %s. Each "
        "process needs its share on one node, and another run, or another part of this one, may "
        "have taken it",
        _UNPLACED_SECONDS,
        ", ".join(waiting()) or "nothing",
        free or "nothing",
    )


def _waiting(ray: Any, cluster: Cluster, groups: Mapping[str, Any]) -> list[str]:
    """Return what of this run waits for room; other runs may wait too."""
    names = {group.id.hex(): name for name, group in groups.items()}
    share = {name: amount for name, amount in cluster.trainers.bundle().items() if amount}
    bundles = [share] * cluster.trainers.workers
    waits = {
        # that of Ray Train has no name
        names.get(number, "trainers")
        for number, group in ray.util.placement_group_table().items()
        if group["state"] == "PENDING"
        and (number in names or [*group["bundles"].values()] == bundles)
    }
    return sorted(waits)


def _cluster_options(cluster: Cluster) -> dict[str, Any]:
    """Return what ``ray.init`` is told of the cluster."""
    if cluster.address is not None:
        return {"address": cluster.address}
    # cores are what Ray counts with, not what there is: a trial may share them
    cores = max(os.cpu_count() or 1, math.ceil(cluster.total()["CPU"]))
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
            # started again wherever there is room; a batch that kills each worker ends the run
            max_restarts=-1,
            max_task_retries=RETRIES,
            **({} if share.gpus else with_environment(NO_GPUS)),
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                groups["rewards"], placement_group_bundle_index=number
            ),
        )
        .remote(run.rewards, list(run.code))
        for number in range(share.workers)
    ]


def _await(ray: Any, done: Callable[[], bool], actor: Any, signals: Sequence[int]) -> int | None:
    """Wait for the trainers; None: they are through, else the status to end with at once."""
    while not done() and not signals:
        time.sleep(0.2)
    if done():
        return None
    logger.info("asked to end: the trainers finish their step and save; once more ends at once")
    looks, heard = -1, time.monotonic()
    while not done():
        # again and again, as an actor that was started again has heard of nothing
        if (now := ray.get(actor.ask_to_end.remote())) != looks:
            looks, heard = now, time.monotonic()
        if time.monotonic() - heard > _SILENCE_SECONDS:
            return TERMINATED
        time.sleep(0.2)
    return None


def _status(cluster: Cluster, result: Callable[[], Any]) -> int:
    """Return the exit status of rank 0's trainer."""
    train = import_module("ray.train")
    try:
        return int(result().return_value)
    except train.ControllerError as error:
        *_, reason = str(error).strip().splitlines()
        raise LaunchError(f"Ray Train could not run the trainers: {reason.strip()}") from error
    except train.TrainingFailedError as error:
        *_, reason = str(error).strip().splitlines()
        raise LaunchError(
            f"the trainers were started again {cluster.max_failures} times (max_failures of the "
            f"cluster), and one was lost once more: {reason.strip()}"
        ) from error


_CLUSTER = "--cluster"
_OF_A_NODE = {("trainer", "strategy"), ("model", "engine")}
"""What may be wrong here alone: too little main memory, or no vLLM."""


class Launcher(Application):
    """Reads the config of ``fit``, and has the workers of a Ray cluster run it.

    Args:
        arguments: Those of ``fit``, the command included, and ``--cluster``.
        debug: Have the trainers show tracebacks, and what other libraries log.
    """

    def __init__(self, arguments: Sequence[str], *, debug: bool = False) -> None:
        own, self._of_fit = divided(arguments)
        cluster = cluster_of(own)
        if debug:
            cluster = replace(cluster, environment={"LRLHF_DEBUG": "1", **cluster.environment})
        self._cluster = cluster
        _check_files(self._of_fit, cluster)
        super().__init__(self._of_fit)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.usage = "lrlhf launch --cluster FILE [the options of lrlhf fit]"
        parser.description = "Run fit on a Ray cluster, and start again what dies."
        parser.add_class_arguments(Cluster, "cluster")  # for its help: they are read apart

    def before_instantiate_classes(self) -> None:
        """Look for mistakes as a trainer does, but for what its node has.

        Raises:
            MistakeError: Something cannot work.
            RefusedError: A class refuses its options.
        """
        options = self.config[self.subcommand]
        trainer_options = options.trainer.clone()
        options.trainer.accelerator, options.trainer.devices = "cpu", 1
        options.trainer.num_nodes = self._cluster.trainers.workers
        try:
            with contextlib.chdir(self._cluster.storage or "."):
                for _ in self.findings():
                    pass
        except MistakeError as error:
            if error.key not in _OF_A_NODE:
                raise
        finally:
            options.trainer = trainer_options

    def instantiate_classes(self) -> None:
        """Build nothing: the trainers do."""

    def run_command(self, subcommand: str) -> None:
        try:
            import_ray()
        except RayMissingError as error:
            raise ConfigError(str(error)) from error
        options = self.config[subcommand]
        if options.ckpt_path not in (None, "last"):
            raise ConfigError(
                f"ckpt_path: {options.ckpt_path} would be loaded again after every failure; "
                "lrlhf launch continues from the last checkpoint of the run folder"
            )
        model = options.model.as_dict()
        files = read_config_files(self._of_fit)
        # a trainer is one of so many, and continues its run
        flags = ["--trainer.devices=1", f"--trainer.num_nodes={self._cluster.trainers.workers}"]
        flags.append("--ckpt_path=last")
        run = Run(
            arguments=[*self._of_fit, *moved(self._cluster, model), *flags],
            folder=options.trainer.default_root_dir,
            rewards=_pickled_rewards(options) if self._cluster.rewards.workers else None,
            code=folders_of_own_code(files),
        )
        if status := launch(self._cluster, run):
            raise SystemExit(status)


def moved(cluster: Cluster, model: Mapping[str, Any]) -> Iterator[str]:
    """Give the flags that put what runs elsewhere in the place of what the config names.

    Raises:
        ConfigError: It names nothing of the kind.
    """
    if cluster.rollouts.replicas:
        path, options = path_to_server(model)
        _check_server(path, options, cluster.rollouts.gpus)
        yield f"--{path}={_name(RayServerEngine)}"
        yield f"--{path}.replicas={cluster.rollouts.replicas}"
    if cluster.rewards.workers:
        if class_of(options_of(model).get("rewards")) not in (Rewards, RayRewards):
            raise ConfigError(
                "rewards.workers of the cluster is above 0, and model.rewards is no "
                "lrlhf.rewards.Rewards: set rewards.workers to 0"
            )
        yield f"--model.rewards={_name(RayRewards)}"


def divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the options of the cluster from those of ``fit``."""
    own: list[str] = []
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, _ = argument.partition("=")
        if name == _CLUSTER or name.startswith(f"{_CLUSTER}."):
            own += [argument] if equals else [argument, *[next(rest, "")]]
        else:
            others.append(argument)
    return own, others


def cluster_of(own: Sequence[str]) -> Cluster:
    """Read the file of the cluster, and the options given over it."""
    # without the word, the options of this parser are those of the file
    parser = Parser(prog="lrlhf launch", allow_abbrev=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Cluster)
    plain = [
        argument.replace(_CLUSTER + ".", "--", 1)
        if argument.startswith(_CLUSTER + ".")
        else argument.replace(_CLUSTER, "--config", 1)
        if argument.split("=")[0] == _CLUSTER
        else argument
        for argument in own
    ]
    try:
        made = parser.instantiate(parser.parse_args(plain))
        return Cluster(**{name: made[name] for name in Cluster.__dataclass_fields__})
    except ValueError as error:
        raise ConfigError(f"cluster: {error}") from error


def path_to_server(model: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Find the engine whose servers are to run elsewhere, wrapped or not, and its options."""
    path, entry = "model.engine", options_of(model).get("engine")
    while entry is not None:
        options = options_of(entry)
        if class_of(entry) in (VLLMServerEngine, RayServerEngine) and options.get("url") is None:
            return path, options
        path, entry = f"{path}.engine", options.get("engine")
    raise ConfigError(
        "rollouts.replicas of the cluster is above 0, and model.engine is no "
        "lrlhf.rollout.VLLMServerEngine without url: add --config lrlhf:engine/vllm_server"
    )


def _check_server(path: str, options: Mapping[str, Any], gpus: float) -> None:
    split = options.get("tensor_parallel_size") or 1
    # part of a GPU is enough for what is not split; without GPUs the processes share cores
    if gpus and max(gpus, 1) != split:
        raise ConfigError(
            f"rollouts.gpus of the cluster is {gpus:g}, and {path}.tensor_parallel_size is "
            f"{split}: set both to the same number"
        )
    if options.get("log_file") is not None:
        raise ConfigError(
            f"{path}.log_file is {options['log_file']}, and servers on other nodes write into "
            "folders there, which their errors name: drop it"
        )


def _check_files(of_fit: Sequence[str], cluster: Cluster) -> None:
    """Refuse configs that trainers, which work in another folder, would read from elsewhere."""
    for name in config_arguments(of_fit):
        there = Path(cluster.storage or ".", name)
        if is_inline(name) or not Path(name).is_file():
            continue  # another part says what is wrong
        if not there.is_file() or there.read_bytes() != Path(name).read_bytes():
            raise ConfigError(
                f"{name} is not {there}, which the trainers would read (storage of the cluster): "
                f"call lrlhf launch in {cluster.storage}, or give the whole path"
            )


def _pickled_rewards(options: Namespace) -> bytes:
    parser = Parser()
    parser.add_subclass_arguments(Rewards, "rewards")
    entry = Namespace(rewards=options.model.init_args.rewards)  # type: ignore[no-untyped-call]
    try:
        return pickle.dumps(parser.instantiate(entry).rewards)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"model.rewards cannot be sent to reward workers ({error}): set rewards.workers of the "
            "cluster to 0, or name its functions by their import paths"
        ) from error


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"
