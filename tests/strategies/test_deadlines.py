"""A phase that takes too long ends the run, which says where it was."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from lrlhf.callbacks import Deadlines
from lrlhf.run.supervision.watch import DeadlineError, PhaseClock, write_stacks
from tests.distributed.runs import ROOT, living, running
from tests.strategies.hanging import run

# the option of the deadline, and what the phase is called; the other four are told as "reward" is
PHASES = {
    "setup": "set-up",
    "load": "loading",
    "data": "data",
    "reward": "reward",
    "train": "train",
    "validation": "validation",
    "save": "saving",
    "end": "end",
}


@pytest.mark.parametrize(("option", "phase"), PHASES.items())
def test_a_phase_that_hangs_in_python_is_interrupted_and_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], option: str, phase: str
) -> None:
    before = signal.getsignal(signal.SIGURG)
    started = time.monotonic()
    with pytest.raises(DeadlineError) as raised:
        run(tmp_path, option, "python", seconds=2.0)
    assert time.monotonic() - started < 60
    assert (tmp_path / "hangs").exists()
    step = {"setup": 1, "load": 1, "validation": 3, "save": 3, "end": 5}.get(option, 2)
    where = f"in phase '{phase}' of iteration {step}"
    said = rf"rank 0 has been {where} for \d+ s, and its deadline is 2 s"
    assert re.match(said, str(raised.value)), raised.value
    assert f"another {option} gives it more time" in str(raised.value)
    stacks = (tmp_path / "stacks_rank0.txt").read_text()
    for dump in (stacks, capfd.readouterr().err):
        assert "hang_here" in dump
        assert f"in phase '{phase}'" in dump
    assert signal.getsignal(signal.SIGURG) == before


def test_a_run_that_is_not_late_hears_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module = run(tmp_path, "data", "never", seconds=60)
    assert module.trainer.global_step == 4
    assert not (tmp_path / "stacks_rank0.txt").exists()
    assert "deadline" not in capfd.readouterr().err


def test_a_save_inside_a_step_has_a_time_of_its_own() -> None:
    clock = PhaseClock()
    clock.enter("train")
    assert clock.tick(2.0) == ("train", 2.0)
    with clock.inside("saving"):
        assert clock.tick(3.0) == ("saving", 3.0)
    assert clock.tick(1.0) == ("train", 3.0)
    clock.enter("data")
    assert clock.tick(0) == ("data", 0)


def test_a_deadline_is_a_number_of_seconds_and_unknown_phases_have_that_of_a_step() -> None:
    deadlines = Deadlines(train=7.0)
    assert deadlines.of("between phases") == deadlines.of("an own phase") == ("train", 7.0)
    with pytest.raises(ValueError, match=r"deadline reward is 0; give seconds above 0, or null"):
        Deadlines(reward=0)
    with pytest.raises(ValueError, match="deadline grace is nan"):
        Deadlines(grace=float("nan"))


def test_a_disk_without_room_for_the_stacks_does_not_keep_the_run_alive(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    where = write_stacks(blocked / "stacks_rank0.txt", "late")
    assert where.startswith("the stacks above (no file of them: ")
    assert "test_a_disk_without_room" in capfd.readouterr().err


# ---- processes


def hanging(folder: Path, *options: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return running([sys.executable, "-m", "tests.strategies.hanging", str(folder), *options], ROOT)


def wait_for_the_hang(folder: Path) -> None:
    deadline = time.monotonic() + 120
    while not (folder / "hangs").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_phase_that_hangs_in_c_ends_the_process_and_its_children(tmp_path: Path) -> None:
    with hanging(tmp_path, "update", "c", "2.0") as process:
        wait_for_the_hang(tmp_path)
        # which only takes a note, and no step ever ends
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: rank 0 has been in phase 'update' of iteration 2 for " in output
    assert "hang_here" in (tmp_path / "stacks_rank0.txt").read_text()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert [pid for pid in pids if pid in living()] == []


@pytest.mark.slow
@pytest.mark.exhaustive
def test_time_in_which_the_process_is_stopped_does_not_count(tmp_path: Path) -> None:
    # the phase itself takes no time; 4 s of stop are twice the deadline
    with hanging(tmp_path, "generate", "pause", "2.0") as process:
        wait_for_the_hang(tmp_path)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(4)
        os.kill(process.pid, signal.SIGCONT)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert output.endswith("done\n")
    assert not (tmp_path / "stacks_rank0.txt").exists()
