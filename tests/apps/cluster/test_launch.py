"""Runs on a real Ray cluster of one machine, and what is killed there."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

pytest.importorskip("ray", reason="the extra ray is not installed")

from lrlhf.models import ScoreModel
from tests.apps.cluster.local_cluster import (
    REWARD_WORKER,
    STEPS,
    TRAIN_WORKER,
    TRAINER,
    assert_equal,
    await_step,
    cluster_of_three,
    ends_within,
    launching,
    nodes_with,
    processes,
    weights,
    write_run,
)
from tests.distributed.runs import ROOT, fit, running
from tests.vlms import picture, save_vlm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]
GUARDED = r"process_guard\.py"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with cluster_of_three(cpus=4) as started:
        yield started


@pytest.fixture(scope="module")
def without(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in two processes, without Ray."""
    config = write_run(tmp_path_factory.mktemp("without") / "run", model_folder)
    with running(fit(config, "--trainer.devices=2"), ROOT) as process:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
    return config


def train(config: Path, *, on_ray: bool) -> None:
    """Train in two processes, and on Ray with a reward worker beside them."""
    command = fit(config, "--trainer.devices=2")
    if on_ray:
        command = launching(config, "null", "--cluster.rewards.workers=1")
    with running(command, ROOT) as process:
        output, _ = process.communicate(timeout=700)
    assert process.returncode == 0, output


def test_a_trial_on_one_machine_trains_and_saves_a_config_of_fit(
    model_folder: str, tmp_path: Path
) -> None:
    config = write_run(tmp_path / "run", model_folder)
    content = yaml.safe_load(config.read_text())
    content["trainer"]["callbacks"].append({"class_path": "tests.apps.cluster.toys.TellsDevice"})
    config.write_text(yaml.safe_dump(content))
    flags = ("--cluster.rewards.workers=1", "--cluster.environment={OWN: here}")
    with running(launching(config, "null", *flags, "--trainer.max_steps=2"), ROOT) as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert (config.parent / "ck" / "step=000002.ckpt").exists()
    assert (config.parent / "device").read_text() == "cpu  here"  # sees no GPU
    saved = yaml.safe_load((config.parent / "config.yaml").read_text())
    assert saved["model"]["init_args"]["rewards"]["class_path"] == "lrlhf.rewards.Rewards"
    assert (saved["trainer"]["devices"], saved["trainer"]["num_nodes"]) == (2, 1)


@pytest.mark.exhaustive
def test_sharded_trainers_and_a_learned_reward_in_a_worker_end_as_without_ray(
    model_folder: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    ScoreModel(source=model_folder).load().save_pretrained(tmp_path / "reward", tokenizer)
    learned = {"class_path": "LearnedReward", "init_args": {"source": str(tmp_path / "reward")}}
    rewards = {"class_path": "Rewards", "init_args": {"functions": [learned]}}
    ends = []
    for name in ("without", "run"):
        config = write_run(tmp_path / name, model_folder, rewards=rewards)
        content = yaml.safe_load(config.read_text())
        fully = {"class_path": "FSDP2", "init_args": {"checkpoint": "full"}}
        content["trainer"] |= {"strategy": fully, "max_steps": 2}
        config.write_text(yaml.safe_dump(content))
        train(config, on_ray=name == "run")
        ends.append(weights(config, 2))
    assert_equal(ends[1], ends[0], atol=1e-6)
    # the reward has trained something
    first = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    moved = [(ends[0][f"policy.{name}"] - one).abs().max() for name, one in first.items()]
    assert max(moved) > 1e-3


@pytest.mark.exhaustive
def test_a_policy_that_is_shown_images_ends_as_without_ray(tmp_path: Path) -> None:
    save_vlm("qwen2_vl", tmp_path / "model")
    functions = ["tests.apps.cluster.toys.letters_of_a_picture"]
    rewards = {"class_path": "Rewards", "init_args": {"functions": functions}}
    ends = []
    for name in ("without", "run"):
        config = write_run(tmp_path / name, str(tmp_path / "model"), rewards=rewards)
        rows = config.parent / "rows.jsonl"
        for number in range(8):
            picture(number).save(config.parent / f"{number}.png")
        asked = [
            {"prompt": [{"role": "user", "content": "what?"}], "images": [f"{number}.png"]}
            for number in range(8)
        ]
        rows.write_text("".join(json.dumps(one) + "\n" for one in asked))
        content = yaml.safe_load(config.read_text())
        content["trainer"]["max_steps"] = 2
        config.write_text(yaml.safe_dump(content))
        train(config, on_ray=name == "run")
        ends.append([weights(config, step) for step in (1, 2)])
    for found, expected in zip(*ends, strict=True):
        assert_equal(found, expected)
    assert any((ends[0][0][name] != last).any() for name, last in ends[0][1].items())


@pytest.mark.exhaustive
def test_a_run_whose_processes_are_killed_ends_as_one_without_ray(
    cluster: Any, without: Path, model_folder: str, tmp_path: Path
) -> None:
    config = write_run(tmp_path / "run", model_folder)
    command = launching(config, cluster.address, "--cluster.rewards.workers=1")
    with running(command, ROOT) as process:
        await_step(process, config, 2)
        first = (config.parent / "ck" / "step=000001.ckpt").stat().st_mtime_ns
        for pattern, step in ((REWARD_WORKER, 4), (TRAINER, 7), (TRAIN_WORKER, 10)):
            processes(cluster, pattern)[0].kill()
            await_step(process, config, step)
        lost = nodes_with(cluster, TRAINER)[0]
        cluster.remove_node(lost, allow_graceful=False)
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    # resumed, not begun again
    assert (config.parent / "ck" / "step=000001.ckpt").stat().st_mtime_ns == first
    for step in (1, 2, STEPS):
        assert_equal(weights(config, step), weights(without, step))
    assert ends_within(20, lambda: bool(processes(cluster, f"{TRAINER}|{GUARDED}|ray::Reward")))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("signals", "status"),
    [
        ([signal.SIGTERM], 143),
        ([signal.SIGINT, signal.SIGINT], 130),
        ([signal.SIGKILL], -signal.SIGKILL),
    ],
)
def test_a_signal_ends_all_of_it(
    cluster: Any, model_folder: str, tmp_path: Path, signals: list[int], status: int
) -> None:
    config = write_run(tmp_path / "run", model_folder)
    command = launching(config, cluster.address, "--trainer.max_steps=10000")
    with running(command, ROOT) as process:
        await_step(process, config, 2)
        for number in signals:
            process.send_signal(number)
            time.sleep(0.5)  # two that come together are one
        output, _ = process.communicate(timeout=180)
    assert process.returncode == status, output
    assert (config.parent / "ck" / "last.ckpt").exists()
    assert ends_within(20, lambda: bool(processes(cluster, f"{TRAINER}|{GUARDED}")))


@pytest.mark.exhaustive
def test_what_rank_zero_alone_refuses_ends_the_run(
    cluster: Any, model_folder: str, tmp_path: Path
) -> None:
    config = write_run(tmp_path / "run", model_folder)
    content = yaml.safe_load(config.read_text())
    content["trainer"]["callbacks"].append(
        {"class_path": "tests.apps.cluster.toys.RefusedByRankZero"}
    )
    config.write_text(yaml.safe_dump(content))
    with running(launching(config, cluster.address), ROOT) as process:
        output, _ = process.communicate(timeout=150)
    assert process.returncode == 2, output
    assert "rank 0 refuses this" in output
    assert ends_within(20, lambda: bool(processes(cluster, f"{TRAINER}|{GUARDED}")))


@pytest.mark.exhaustive
def test_a_run_whose_controller_is_killed_goes_on(
    cluster: Any, model_folder: str, tmp_path: Path
) -> None:
    config = write_run(tmp_path / "run", model_folder)
    command = launching(config, cluster.address, "--trainer.max_steps=6")
    with running(command, ROOT) as process:
        await_step(process, config, 2)
        processes(cluster, r"ray::TrainController")[0].kill()
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "controller was lost: the trainers are started again" in output
    assert (config.parent / "ck" / "step=000006.ckpt").exists()


@pytest.mark.exhaustive
def test_a_trainer_that_is_lost_too_often_ends_the_run(
    cluster: Any, model_folder: str, tmp_path: Path
) -> None:
    config = write_run(tmp_path / "run", model_folder)
    command = launching(config, cluster.address, "--cluster.max_failures=0")
    with running(command, ROOT) as process:
        await_step(process, config, 1)
        processes(cluster, TRAINER)[0].kill()
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 1, output
    assert "error: the trainers were started again 0 times (max_failures of the cluster)" in output
