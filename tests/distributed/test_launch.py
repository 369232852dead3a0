"""Runs on several processes, however they are started, and what happens when one is gone."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lrlhf.run.supervision.watch import LostProcessError, Watch, watch_over
from tests.callbacks.fakes import ToyPolicy, trainer
from tests.distributed.runs import (
    ROOT,
    environment,
    fit,
    members,
    pid_of,
    running,
    wait_for,
    write_config,
)


def watch_of(tmp_path: Path) -> Watch:
    made = trainer(tmp_path)
    made.strategy._lightning_module = module = ToyPolicy()
    module.trainer = made
    watch_over(made, grace_s=0.1, poll_s=0.01)
    (watch,) = [callback for callback in made.callbacks if isinstance(callback, Watch)]
    return watch


# as gloo 2.13, NCCL 2.27 and the store of torch wrote them
GONE = [
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error [::1]:9: "
    "Connection reset by peer",
    "NCCL error: remote process exited or there was a network error, NCCL version 2.27.7",
]
SILENT = [
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting "
    "1800000ms for recv operation to complete",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:524] Application timeout caused pair closure",
    "Application timeout caused pair closure",
]


@pytest.mark.parametrize(
    ("said", "what"),
    [(text, "ended") for text in GONE]
    + [(text, "did not answer within 1800 s") for text in SILENT],
)
def test_the_error_of_a_collective_names_phase_and_rank(
    tmp_path: Path, said: str, what: str
) -> None:
    watch = watch_of(tmp_path)
    watch.on_phase("update")
    expected = f"another process {what} while rank 0 was in phase 'update' of iteration 1 ("
    refused = pytest.raises(LostProcessError, match=re.escape(expected))
    with refused, watch.naming_lost_processes():
        raise RuntimeError(said)


@pytest.mark.parametrize("said", ["shapes differ", "the reward service timed out"])
def test_another_error_stays_as_it_is(tmp_path: Path, said: str) -> None:
    watch = watch_of(tmp_path)
    with pytest.raises(RuntimeError, match=said) as raised, watch.naming_lost_processes():
        raise RuntimeError(said)
    assert type(raised.value) is RuntimeError


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_killed_rank_ends_the_others_and_they_name_the_phase(tmp_path: Path, rank: int) -> None:
    with running(fit(write_config(tmp_path)), ROOT) as process:
        wait_for(tmp_path, 1 - rank, 4, "update")
        os.kill(pid_of(tmp_path, rank), signal.SIGKILL)
        started = time.monotonic()
        output, _ = process.communicate(timeout=180)
        while members(process.pid) and time.monotonic() - started < 30:
            time.sleep(0.1)
        assert members(process.pid) == []
        assert time.monotonic() - started < 30
    # the launcher is rank 0: killed itself, or ended with an error
    assert process.returncode == (-signal.SIGKILL if rank == 0 else 1)
    who = "the process that launched this one is gone" if rank == 0 else "rank 1 was ended by"
    found = re.search(r"error: another process ended while rank (\d) was in phase '(.+)'", output)
    assert found is not None, output
    assert found[1] == str(1 - rank)
    assert found[2] in {"generate", "update", "between phases", "after the update", "train"}
    assert who in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_rank_that_is_stuck_where_no_error_reaches_it_is_ended(tmp_path: Path) -> None:
    # as in a collective of NCCL; the other rank dies meanwhile
    config = write_config(tmp_path)
    with running(fit(config, "--model.stuck_at=4"), ROOT) as process:
        wait_for(tmp_path, 0, 4, "stuck")
        os.kill(pid_of(tmp_path, 1), signal.SIGKILL)
        output, _ = process.communicate(timeout=180)
        assert members(process.pid) == []
    assert process.returncode == 1
    line = "another process ended while rank 0 was in phase 'generate' of iteration 4 (rank 1 was"
    assert line in output


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_rank_that_does_not_answer_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    strategy = {
        "class_path": "lightning.pytorch.strategies.DDPStrategy",
        "init_args": {"find_unused_parameters": True, "timeout": "0:01:00"},
    }
    with running(fit(write_config(tmp_path, strategy=strategy)), ROOT) as process:
        wait_for(tmp_path, 0, 4, "update")
        os.kill(pid_of(tmp_path, 1), signal.SIGSTOP)
        output, _ = process.communicate(timeout=300)
        assert members(process.pid) == []
    assert process.returncode == 1
    assert "another process did not answer within 60 s while rank 0 was in phase '" in output


# ---- launchers


def finished(folder: Path) -> float:
    saved = torch.load(folder / "ck" / "last.ckpt", weights_only=True)
    return float(saved["state_dict"]["policy.weight"])


def ran_as(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("rank*.pid")}


def three_steps(folder: Path, **trainer_options: object) -> Path:
    return write_config(folder, max_steps=3, **trainer_options)


def torchrun(config: Path, *options: str) -> list[str]:
    runner = [sys.executable, "-m", "torch.distributed.run", *options]
    return [*runner, "-m", "lrlhf", "fit", "--config", str(config)]


def both(commands: list[list[str]], extras: list[dict[str, str]]) -> list[int]:
    started = [
        subprocess.Popen(command, cwd=ROOT, env=environment(extra))
        for command, extra in zip(commands, extras, strict=True)
    ]
    return [process.wait(timeout=300) for process in started]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_torchrun_on_two_machines(tmp_path: Path) -> None:
    config = three_steps(tmp_path, devices=1, num_nodes=2)
    meeting = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", "--master-port=29611"]
    commands = [torchrun(config, *meeting, f"--node-rank={rank}") for rank in range(2)]
    assert both(commands, [{}, {}]) == [0, 0]
    assert (finished(tmp_path), ran_as(tmp_path)) == (3.0, {"rank0.pid", "rank1.pid"})


@pytest.mark.slow
@pytest.mark.exhaustive
def test_lightnings_variables_on_two_machines(tmp_path: Path) -> None:
    config = three_steps(tmp_path, devices=1, num_nodes=2)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29612"}
    extras = [{**shared, "NODE_RANK": str(rank)} for rank in range(2)]
    assert both([fit(config)] * 2, extras) == [0, 0]
    assert (finished(tmp_path), ran_as(tmp_path)) == (3.0, {"rank0.pid", "rank1.pid"})


@pytest.mark.slow
@pytest.mark.exhaustive
def test_tasks_of_slurm(tmp_path: Path) -> None:
    shared = {
        "SLURM_JOB_ID": "4713",
        "SLURM_JOB_NAME": "rlhf",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
    }
    tasks = [{**shared, "SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{rank}"} for rank in range(2)]
    assert both([fit(three_steps(tmp_path))] * 2, tasks) == [0, 0]
    assert (finished(tmp_path), ran_as(tmp_path)) == (3.0, {"rank0.pid", "rank1.pid"})


@pytest.mark.slow
@pytest.mark.exhaustive
def test_torchrun_passes_sigterm_on_and_waits_for_the_checkpoint(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with running(torchrun(config, "--standalone", "--nproc-per-node=2"), ROOT) as process:
        wait_for(tmp_path, 0, 4, "update")
        os.kill(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=180)
    assert process.returncode != 0
    assert output.count("error: terminated; --ckpt_path last continues") == 2, output
    assert finished(tmp_path) >= 4
