"""What a cluster file says, and how a launch divides it from the run's own options."""

import importlib.util
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import Namespace

from lrlhf.apps.cluster import Cluster, RewardWorkers, Rollouts, Trainers
from lrlhf.apps.cluster.connection import RayMissingError
from lrlhf.apps.cluster.launch import (
    Launcher,
    LaunchError,
    _check_files,
    _check_room,
    _pickled_rewards,
    cluster_of,
    divided,
    moved,
    path_to_server,
)
from lrlhf.apps.cluster.replicas import RayServerEngine
from lrlhf.apps.cluster.rewards import RayRewards
from lrlhf.cli import run
from lrlhf.cli.application import Application
from lrlhf.cli.config_entries import class_of
from lrlhf.cli.saved_config import SaveConfig
from lrlhf.options.errors import ConfigError
from lrlhf.options.parser import Parser
from tests.cli.experiment import experiment

ROOT = Path(__file__).parents[3]
RAY_ENGINE = "lrlhf.apps.cluster.replicas.RayServerEngine"
SERVER = {"class_path": "lrlhf.rollout.VLLMServerEngine", "init_args": {}}
REWARDS = {"class_path": "lrlhf.rewards.Rewards", "init_args": {"functions": ["exact_match"]}}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Trainers(workers=0), "trainers.workers is 0; it must be 1 or more"),
        (lambda: Trainers(gpus=2), "trainers.gpus is 2; each process has 1 GPU, or 0"),
        (lambda: Rollouts(replicas=-1), "rollouts.replicas is -1; it must be 0 or more"),
        (lambda: RewardWorkers(workers=-1), "rewards.workers is -1; it must be 0 or more"),
        (lambda: RewardWorkers(cpus=-2), "CPU is -2; it must not be below 0"),
        (lambda: Rollouts(resources={"big": -1}), "big is -1; it must not be below 0"),
        (lambda: Cluster(max_failures=-2), "max_failures is -2; it must be -1 or more"),
        (lambda: Cluster(address="ray://head:10001"), "call lrlhf launch on a node"),
        (lambda: Cluster(storage="/nowhere"), "there is no such folder here"),
    ],
)
def test_what_cannot_be_taken_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_a_file_and_the_options_over_it_make_a_cluster(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    content = {"address": None, "trainers": {"workers": 4, "cpus": 3}, "rewards": {"workers": 2}}
    file.write_text(yaml.safe_dump(content))
    arguments = ["fit", "--cluster", str(file), "--config", "a.yaml", "--data.batch_size=4"]
    arguments += ["--cluster.trainers.workers", "8", "--cluster.rollouts.resources={big: 1}"]
    own, others = divided(arguments)
    assert others == ["fit", "--config", "a.yaml", "--data.batch_size=4"]
    cluster = cluster_of(own)
    assert cluster == Cluster(
        address=None,
        trainers=Trainers(workers=8, cpus=3),
        rollouts=Rollouts(resources={"big": 1}),
        rewards=RewardWorkers(workers=2),
    )
    assert cluster.bundles() == {"rollouts": [], "rewards": [{"CPU": 1, "GPU": 0}] * 2}
    assert cluster.total() == {"CPU": 8 * 3 + 2, "GPU": 0}


def test_what_a_cluster_lacks_is_named() -> None:
    cluster = Cluster(
        trainers=Trainers(workers=2, gpus=1, cpus=3),
        rollouts=Rollouts(replicas=2, gpus=2, resources={"big": 1}),
    )
    there = {"CPU": 8.0, "GPU": 5.0}
    assert cluster.missing(there) == "6 GPU (there 5), 2 big (there 0)"
    assert cluster.missing({**there, "GPU": 6.0, "big": 2.0}) == ""
    with pytest.raises(LaunchError, match=r"takes 6 GPU \(there 5\), .* no node joins"):
        _check_room(replace(cluster, address=None), there)


def test_a_cluster_that_lacks_something_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    _check_room(Cluster(trainers=Trainers(gpus=1)), {"CPU": 8.0})
    assert "takes 1 GPU (there 0): it waits until nodes" in caplog.text


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "cluster").glob("*.yaml")))
def test_the_files_that_are_shipped_are_read(path: Path) -> None:
    assert cluster_of(["--cluster", str(path)]).trainers.workers > 1


def test_servers_and_rewards_move_and_keep_their_options() -> None:
    wrapped = {"class_path": "EngineWrapper", "init_args": {"engine": SERVER}}
    model = {"init_args": {"engine": wrapped, "rewards": REWARDS}, "class_path": "RLOO"}
    cluster = Cluster(rollouts=Rollouts(replicas=3), rewards=RewardWorkers(workers=1))
    assert [*moved(cluster, model)] == [
        "--model.engine.engine=lrlhf.apps.cluster.replicas.RayServerEngine",
        "--model.engine.engine.replicas=3",
        "--model.rewards=lrlhf.apps.cluster.rewards.RayRewards",
    ]
    assert [*moved(Cluster(), model)] == []


@pytest.mark.parametrize("engine", [None, {**SERVER, "init_args": {"url": "http://a:1"}}])
def test_replicas_need_an_engine_that_starts_servers(engine: Any) -> None:
    with pytest.raises(ConfigError, match=r"model\.engine is no lrlhf.rollout.VLLMServerEngine"):
        path_to_server({"class_path": "RLOO", "init_args": {"engine": engine}})


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        (2, {}, "rollouts.gpus of the cluster is 2, and model.engine.tensor_parallel_size is 1"),
        (1, {"tensor_parallel_size": 4}, "model.engine.tensor_parallel_size is 4"),
        (1, {"log_file": "a.log"}, "model.engine.log_file is a.log"),
    ],
)
def test_what_servers_elsewhere_cannot_do_is_refused(
    gpus: float, options: dict[str, Any], message: str
) -> None:
    model = {"class_path": "RLOO", "init_args": {"engine": {**SERVER, "init_args": options}}}
    with pytest.raises(ConfigError, match=message):
        [*moved(Cluster(rollouts=Rollouts(replicas=1, gpus=gpus)), model)]


@pytest.mark.parametrize(("gpus", "split"), [(0, 2), (0.5, 1), (1, 1), (4, 4)])
def test_gpus_of_a_server_are_those_that_it_splits_over(gpus: float, split: int) -> None:
    engine = {**SERVER, "init_args": {"tensor_parallel_size": split}}
    model = {"class_path": "RLOO", "init_args": {"engine": engine}}
    assert len([*moved(Cluster(rollouts=Rollouts(replicas=1, gpus=gpus)), model)]) == 2


def test_the_config_of_a_launched_run_is_launched_again() -> None:
    model = {
        "class_path": "RLOO",
        "init_args": {
            "engine": {
                "class_path": "lrlhf.apps.cluster.replicas.RayServerEngine",
                "init_args": {},
            },
            "rewards": {"class_path": "lrlhf.apps.cluster.rewards.RayRewards", "init_args": {}},
        },
    }
    cluster = Cluster(rollouts=Rollouts(replicas=3), rewards=RewardWorkers(workers=1))
    assert [*moved(cluster, model)] == [
        f"--model.engine={RAY_ENGINE}",
        "--model.engine.replicas=3",
        "--model.rewards=lrlhf.apps.cluster.rewards.RayRewards",
    ]


def test_the_config_of_a_launched_run_is_saved_as_one_of_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LRLHF_RAY_NAMESPACE", "run")
    engine = Namespace(class_path=RAY_ENGINE, init_args=Namespace(replicas=2))
    config = Namespace(
        model=Namespace(init_args=Namespace(engine=engine)),
        trainer=Namespace(devices=1, num_nodes=2),
    )
    saved = SaveConfig(Parser(), config).config
    assert saved.model.init_args.engine.class_path == "lrlhf.rollout.VLLMServerEngine"
    assert (saved.trainer.devices, saved.trainer.num_nodes) == (2, 1)


@pytest.mark.parametrize("replaced", [RayServerEngine, RayRewards])
def test_a_class_that_launch_names_is_a_kind_of_the_one_that_it_stands_for(replaced: type) -> None:
    assert issubclass(replaced, class_of(replaced.stands_for) or int)  # type: ignore[attr-defined]


def test_a_config_that_trainers_would_read_from_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, shared = tmp_path / "here", tmp_path / "shared"
    for folder in (here, shared):
        folder.mkdir()
        (folder / "run.yaml").write_text("a: 1")
    monkeypatch.chdir(here)
    cluster = Cluster(storage=str(shared))
    _check_files(["fit", "--config", "run.yaml"], cluster)
    (shared / "run.yaml").write_text("a: 2")
    with pytest.raises(ConfigError, match=r"run.yaml is not .*/shared/run.yaml, which the trainer"):
        _check_files(["fit", "--config", "run.yaml"], cluster)
    _check_files(["fit", "--config", str(here / "run.yaml")], cluster)


class NotSent:
    """A reward that cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, completions: Any, **_: Any) -> list[float]:
        return [0.0 for _ in completions]


def test_rewards_that_cannot_be_sent_say_what_to_set() -> None:
    functions = [{"class_path": f"{__name__}.NotSent"}]
    rewards = Namespace(class_path="lrlhf.rewards.Rewards", init_args={"functions": functions})
    options = Namespace(model=Namespace(init_args=Namespace(rewards=rewards)))
    with pytest.raises(ConfigError, match=r"_thread.lock.*set rewards.workers of the cluster to 0"):
        _pickled_rewards(options)


def test_reward_workers_need_rewards() -> None:
    cluster = Cluster(rewards=RewardWorkers(workers=1))
    with pytest.raises(ConfigError, match=r"model\.rewards is no lrlhf.rewards.Rewards"):
        [*moved(cluster, {"class_path": "RewardModel", "init_args": {}})]


def test_a_mistake_is_found_before_anything_is_launched(
    model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"train": str(tmp_path / "rows.jsonl"), "batch_size": 2}
    content = experiment("RLOO", {"policy": model_folder}, data, reward="exact_match")
    # the machine that launches may have none
    content["trainer"]["accelerator"] = "gpu"
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(content))
    assert run(["launch", "--config", str(config)]) == 2
    assert "rows.jsonl" in capsys.readouterr().err


def test_debug_reaches_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Application, "__init__", lambda *_: None)
    assert Launcher(["fit"], debug=True)._cluster.environment == {"LRLHF_DEBUG": "1"}


def test_outside_of_a_launch_its_rewards_say_where_they_belong() -> None:
    rewards = RayRewards(["exact_match"])
    assert rewards.names == ("exact_match",)
    with pytest.raises(RayMissingError, match="RayRewards belongs to lrlhf launch"):
        rewards.prepare()


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_a_launch_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", "--config", str(ROOT / "configs" / "quickstart.yaml")]) == 2
    assert "Ray is not installed: pip install 'lrlhf[ray]'" in capsys.readouterr().err
