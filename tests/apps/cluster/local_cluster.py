"""A Ray cluster of three nodes that are processes of this machine, and runs on it."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from tests.cli.experiment import experiment
from tests.distributed.runs import descendants

STEPS = 16
TRAINER, TRAIN_WORKER, REWARD_WORKER = (
    r"^\S+ -m lrlhf fit",
    r"ray::.*RayTrainWorker",
    r"ray::Reward",
)


@contextmanager
def cluster_of_three(cpus: int) -> Iterator[Any]:
    """A head that runs nothing, and two workers of so many cores each."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415  not installed everywhere

    before = dict(os.environ)
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    # what else runs on this machine may take its memory, for which workers would be killed
    os.environ |= {"RAY_memory_monitor_refresh_ms": "0"}
    sizes = {"object_store_memory": 100_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **sizes})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=cpus, **sizes)
        yield cluster
    finally:
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)


def write_run(folder: Path, model: str, **options: Any) -> Path:
    """A run of RLOO with a checkpoint after each of its steps."""
    folder.mkdir()
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{letter}?"}) + "\n" for letter in "abcdefgh"))
    saves = {"dirpath": str(folder / "ck"), "every_n_train_steps": 1, "save_top_k": -1}
    config = experiment(
        "RLOO",
        {"policy": model, "optimizer": {"lr": 5e-3}, **options},
        {"train": str(rows), "batch_size": 2},
        reward="tests.apps.cluster.toys.slow_letters",
        max_steps=STEPS,
        enable_checkpointing=True,
        default_root_dir=str(folder),
        strategy="ddp_find_unused_parameters_true",
        callbacks=[{"class_path": "RLCheckpoint", "init_args": saves}],
    )
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def launching(config: Path, address: str, *flags: str) -> list[str]:
    shares = (f"--cluster.address={address}", "--cluster.trainers.workers=2")
    command = [sys.executable, "-m", "lrlhf", "launch", "--config", str(config)]
    return [*command, *shares, *flags]


def weights(config: Path, step: int) -> dict[str, torch.Tensor]:
    path = config.parent / "ck" / f"step={step:06d}.ckpt"
    saved: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return saved


def assert_equal(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, atol: float = 0.0
) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=name)


def await_step(process: Any, config: Path, step: int) -> None:
    """Wait until so many steps are saved.

    Raises:
        RuntimeError: The launch ended before; with its output.
        TimeoutError: They are not after ten minutes.
    """
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        saved = [int(path.stem[5:]) for path in (config.parent / "ck").glob("step=*.ckpt")]
        if max(saved, default=0) >= step:
            return
        if process.poll() is not None:
            raise RuntimeError(process.communicate()[0])
        time.sleep(0.05)
    raise TimeoutError(f"step {step} was not saved")


def processes(cluster: Any, pattern: str) -> list[psutil.Process]:
    """Processes of the cluster's nodes by what their command lines hold."""
    found = []
    for node in (cluster.head_node, *cluster.worker_nodes):
        for pid in descendants(_raylet(node)):
            try:
                process = psutil.Process(pid)
                if re.search(pattern, " ".join(process.cmdline())):
                    found.append(process)
            except psutil.Error:
                continue
    return found


def nodes_with(cluster: Any, pattern: str) -> list[Any]:
    """Worker nodes on which such a process runs."""
    pids = {process.pid for process in processes(cluster, pattern)}
    return [node for node in cluster.worker_nodes if pids & {*descendants(_raylet(node))}]


def _raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def ends_within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether a condition no longer holds after so long."""
    deadline = time.monotonic() + seconds
    while condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not condition()
