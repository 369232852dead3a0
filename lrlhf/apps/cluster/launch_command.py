"""``lrlhf launch``: ``fit`` on a Ray cluster."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lrlhf.apps.cluster import Cluster
from lrlhf.apps.cluster.connection import RayMissingError, import_ray
from lrlhf.apps.cluster.launch import Run, launch
from lrlhf.apps.cluster.replicas import RayServerEngine
from lrlhf.apps.cluster.rewards import RayRewards
from lrlhf.cli.application import Application
from lrlhf.cli.config_files import (
    config_arguments,
    folders_of_own_code,
    is_inline,
    read_config_files,
)
from lrlhf.cli.messages.errors import ConfigError
from lrlhf.cli.parser import Parser
from lrlhf.planning.checks.mistake import MistakeError
from lrlhf.planning.config_entries import class_of, options_of
from lrlhf.rewards import Rewards
from lrlhf.rollout import VLLMServerEngine

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
        given = options.trainer.clone()
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
            options.trainer = given

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
        run = Run(
            arguments=[*self._of_fit, *moved(self._cluster, model), *_rank_flags(self._cluster)],
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
        "lrlhf.rollout.VLLMServerEngine without url: add --config configs/engine/vllm_server.yaml"
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


def _rank_flags(cluster: Cluster) -> list[str]:
    """Return the flags by which a trainer is one of so many, and continues its run."""
    of_trainer = {"devices": 1, "num_nodes": cluster.trainers.workers}
    flags = [f"--trainer.{name}={value}" for name, value in of_trainer.items()]
    return [*flags, "--ckpt_path=last"]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"
