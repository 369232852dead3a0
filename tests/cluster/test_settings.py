"""What a cluster file says, and how a launch divides it from the run's own options."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from lrlhf.cli import run
from lrlhf.cli.launch_command import cluster_of, divided, moved, path_to_server
from lrlhf.cli.messages.errors import ConfigError
from lrlhf.cluster import Cluster, RewardWorkers, Rollouts, Trainers
from lrlhf.cluster.connection import RayMissingError
from lrlhf.cluster.rewards import RayRewards

ROOT = Path(__file__).parents[2]
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
    assert cluster.cpus() == 8 * 3 + 2


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "cluster").glob("*.yaml")))
def test_the_files_that_are_shipped_are_read(path: Path) -> None:
    assert cluster_of(["--cluster", str(path)]).trainers.workers > 1


def test_servers_and_rewards_move_and_keep_their_options() -> None:
    wrapped = {"class_path": "EngineWrapper", "init_args": {"engine": SERVER}}
    model = {"init_args": {"engine": wrapped, "rewards": REWARDS}, "class_path": "RLOO"}
    cluster = Cluster(rollouts=Rollouts(replicas=3), rewards=RewardWorkers(workers=1))
    assert [*moved(cluster, model)] == [
        "--model.engine.engine=lrlhf.cluster.replicas.RayServerEngine",
        "--model.engine.engine.replicas=3",
        "--model.rewards=lrlhf.cluster.rewards.RayRewards",
    ]
    assert [*moved(Cluster(), model)] == []


@pytest.mark.parametrize("engine", [None, {**SERVER, "init_args": {"url": "http://a:1"}}])
def test_replicas_need_an_engine_that_starts_servers(engine: Any) -> None:
    with pytest.raises(ConfigError, match=r"model\.engine is no lrlhf.rollout.VLLMServerEngine"):
        path_to_server({"class_path": "RLOO", "init_args": {"engine": engine}})


def test_reward_workers_need_rewards() -> None:
    cluster = Cluster(rewards=RewardWorkers(workers=1))
    with pytest.raises(ConfigError, match=r"model\.rewards is no lrlhf.rewards.Rewards"):
        [*moved(cluster, {"class_path": "RewardModel", "init_args": {}})]


def test_outside_of_a_launch_its_rewards_say_where_they_belong() -> None:
    rewards = RayRewards(["exact_match"])
    assert rewards.names == ("exact_match",)
    with pytest.raises(RayMissingError, match="RayRewards belongs to lrlhf launch"):
        rewards.prepare()


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_a_launch_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", "--config", str(ROOT / "configs" / "quickstart.yaml")]) == 2
    assert "Ray is not installed: pip install 'lrlhf[ray]'" in capsys.readouterr().err
