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


# as gloo 2.13 and NCCL 2.27 wrote them
GONE, SILENT = "ended", "did not answer within 1800 s"


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("[pair.cc:547] gloo: Read error [::1]:9: Connection reset by peer", GONE),
        ("NCCL error: remote process exited or there was a network error, version 2.27.7", GONE),
        ("gloo: Timed out waiting 1800000ms for recv operation to complete", SILENT),
        ("Application timeout caused pair closure", SILENT),
        ("shapes differ", ""),
        ("the reward service timed out", ""),
    ],
)
def test_the_error_of_a_collective_names_phase_and_rank_and_others_stay(
    tmp_path: Path, said: str, what: str
) -> None:
    watch = watch_of(tmp_path)
    watch.on_phase("update")
    expected = f"another process {what} while rank 0 was in phase 'update' of iteration 1 ("
    with (
        pytest.raises(RuntimeError, match=re.escape(expected if what else said)) as raised,
        watch.naming_lost_processes(),
    ):
        raise RuntimeError(said)
    assert type(raised.value) is (LostProcessError if what else RuntimeError)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_killed_rank_ends_the_others_and_they_name_the_phase(tmp_path: Path, rank: int) -> None:
    with running(fit(write_config(tmp_path)), ROOT) as process:
        wait_for(process, tmp_path, 1 - rank, 4, "update")
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
        wait_for(process, tmp_path, 0, 4, "stuck")
        os.kill(pid_of(tmp_path, 1), signal.SIGKILL)
        output, _ = process.communicate(timeout=180)
        assert members(process.pid) == []
    assert process.returncode == 1
    line = "another process ended while rank 0 was in phase 'generate' of iteration 4 (rank 1 was"
    assert line in output


# ---- launchers


def finished(folder: Path) -> float:
    saved = torch.load(folder / "ck" / "last.ckpt", weights_only=True)
    return float(saved["state_dict"]["policy.weight"])


def torchrun(config: Path, *options: str) -> list[str]:
    runner = [sys.executable, "-m", "torch.distributed.run", *options]
    return [*runner, "-m", "lrlhf", "fit", "--config", str(config)]


SLURM = {
    "SLURM_JOB_ID": "4713",
    "SLURM_JOB_NAME": "rlhf",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "127.0.0.1",
}
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29612"}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", ["torchrun", "lightning", "slurm"])
def test_two_processes_that_were_started_apart_meet(tmp_path: Path, launcher: str) -> None:
    machines = {} if launcher == "slurm" else {"devices": 1, "num_nodes": 2}
    config = write_config(tmp_path, max_steps=3, **machines)
    started = []
    for rank in range(2):
        command, extra = fit(config), {}
        if launcher == "torchrun":
            meeting = ("--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1")
            command = torchrun(config, *meeting, "--master-port=29611", f"--node-rank={rank}")
        elif launcher == "lightning":
            extra = {**MEETING, "NODE_RANK": f"{rank}"}
        else:
            extra = {**SLURM, "SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{rank}"}
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment(extra)))
    assert [process.wait(timeout=300) for process in started] == [0, 0]
    assert finished(tmp_path) == 3.0
    assert {path.name for path in tmp_path.glob("rank*.pid")} == {"rank0.pid", "rank1.pid"}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_torchrun_passes_sigterm_on_and_waits_for_the_checkpoint(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with running(torchrun(config, "--standalone", "--nproc-per-node=2"), ROOT) as process:
        wait_for(process, tmp_path, 0, 4, "update")
        os.kill(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=180)
    assert process.returncode != 0
    assert output.count("error: terminated; --ckpt_path last continues") == 2, output
    assert finished(tmp_path) >= 4
