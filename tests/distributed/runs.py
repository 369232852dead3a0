"""Starts ``lrlhf fit`` in processes, sends signals at known moments, and cleans up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from tests.forked import Popen

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "PYTHONPATH": str(ROOT),
    "GLOO_SOCKET_IFNAME": "lo",
}
# what a test runner on a cluster, or a test before, may have left
LEFT_OVER = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")


def write_config(folder: Path, **trainer: object) -> Path:
    """A config of `CountingPolicy`; ``trainer`` adds to the trainer's options."""
    config = {
        "model": {
            "class_path": "tests.distributed.toys.CountingPolicy",
            "init_args": {"folder": str(folder)},
        },
        "data": {"class_path": "tests.distributed.toys.CountingData"},
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": "ddp_find_unused_parameters_true",
            "max_steps": 10_000,
            "default_root_dir": str(folder),
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "plugins": ["AtomicCheckpointIO"],
            "callbacks": [
                {"class_path": "RLCheckpoint", "init_args": {"dirpath": str(folder / "ck")}}
            ],
            **trainer,
        },
    }
    path = folder / "toy.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def environment(extra: Mapping[str, str] = {}) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if name not in LEFT_OVER}
    kept = {name: value for name, value in plain.items() if not name.startswith("SLURM")}
    return {**kept, **ENVIRONMENT, **extra}


def fit(config: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "lrlhf", "fit", "--config", str(config), *flags]


@contextmanager
def running(
    command: Sequence[str], folder: Path, extra: Mapping[str, str] = {}
) -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own, none of whose processes survives the block."""
    process = Popen(
        command,
        cwd=folder,
        env=environment(extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        # torchrun gives its processes sessions of their own
        for pid in {*members(process.pid), *descendants(process.pid)}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def members(session: int) -> list[int]:
    """Living processes of a session."""
    return [pid for pid, (_, of) in living().items() if of == session]


def descendants(pid: int) -> list[int]:
    """Living processes that a process started, and those that these started."""
    processes = living()
    children = [child for child, (parent, _) in processes.items() if parent == pid]
    return [*children, *(one for child in children for one in descendants(child))]


def living() -> dict[int, tuple[int, int]]:
    """Parent and session of every process."""
    found: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if fields[0] != "Z":
            found[int(entry.name)] = (int(fields[1]), int(fields[3]))
    return found


def wait_for(
    process: subprocess.Popen[str], folder: Path, rank: int, step: int, phase: str
) -> None:
    """Wait until a rank is in a phase of a step, or of a later one.

    Raises:
        RuntimeError: The process ended before; with its output.
        TimeoutError: It was not there after 300 s.
    """
    mark = folder / f"rank{rank}.phase"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if mark.exists():
            now, name = mark.read_text().split()
            if int(now) >= step and name == phase:
                return
        if process.poll() is not None:
            output, _ = process.communicate()
            raise RuntimeError(f"ended with {process.returncode} before step {step}:\n{output}")
        time.sleep(0.01)
    raise TimeoutError(f"rank {rank} was not in phase {phase!r} of step {step}")


def pid_of(folder: Path, rank: int) -> int:
    return int((folder / f"rank{rank}.pid").read_text())
