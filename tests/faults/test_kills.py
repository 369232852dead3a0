"""A run that is killed and continued ends as one that nothing disturbed, to the last bit."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.faults.campaign import carry_out, plan
from tests.faults.cases import CASES, ROOT
from tests.faults.compare import differences
from tests.faults.kills import Harness, Outcome
from tests.faults.processes import BrokenRunError, Course, Fresh, Nursery, Process


@pytest.fixture(scope="module")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """Runs forked from one process: an import of everything takes as long as a whole run."""
    nursery = Nursery()
    yield Harness(tmp_path_factory.mktemp("kills"), keep=True, starter=nursery)
    nursery.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kills"),
    [
        ("rloo", ["torn:.*.ckpt.tmp@2", "update@7"]),
        pytest.param("rloo", ["validating@8", "rename:final@1"], marks=pytest.mark.exhaustive),
        ("ppo", ["renamed:*.ckpt@2", "torn:metrics.csv@2"]),
        pytest.param("rloo_media", ["torn:rollouts.jsonl@6"], marks=pytest.mark.exhaustive),
        ("reward_model", ["trained@5", "ending@9"]),
    ],
)
def test_a_killed_run_ends_as_if_nothing_had_happened(
    case: str, kills: list[str], forking: Harness
) -> None:
    outcome = forking.disturbed(CASES[case], kills)
    assert outcome.differences == []
    assert len(outcome.reached) == len(kills)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_kill_from_outside_at_any_time_changes_nothing(forking: Harness) -> None:
    forking.starter, forked = Fresh(), forking.starter
    outcome = forking.disturbed(CASES["rloo"], ["time:0.5"])
    forking.starter = forked
    assert outcome.differences == []


@pytest.mark.slow
def test_an_instant_that_does_not_come_is_an_error(forking: Harness) -> None:
    with pytest.raises(BrokenRunError, match="killed at update@99, and ended by itself"):
        forking.disturbed(CASES["rloo"], ["update@99"])


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_killed_run_with_vllm_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    outcome = Harness(tmp_path, keep=True).disturbed(CASES["rloo_vllm"], ["generate@7"])
    assert outcome.differences == []


# ---------------------------------------------------------------------- the harness itself


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two run folders with the same in them."""
    for name in ("whole", "resumed"):
        folder = tmp_path / name
        (folder / "ckpt").mkdir(parents=True)
        (folder / "rollouts.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
        (folder / "timings.csv").write_text(f"{name} takes its time\n")
        state = {
            "weight": torch.tensor([0.0, float("nan")]),
            "steps": [1, 2],
            "best": f"{folder}/ckpt/1.ckpt",
        }
        torch.save(state, folder / "ckpt" / "last.ckpt")
    return tmp_path / "whole", tmp_path / "resumed"


def test_equal_folders_have_no_differences(folders: tuple[Path, Path]) -> None:
    # a path in a checkpoint counts from its own folder on, and times do not count
    assert differences(*folders) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"weight": torch.tensor([-0.0, float("nan")])}, ".weight differs"),
        ({"weight": torch.tensor([0.0, 1.0])}, ".weight differs"),
        ({"steps": [1, 3]}, ".steps.1 is 2 and 3"),
        ({"steps": [1]}, ".steps.1 is in one only"),
        ({"steps": (1, 2)}, ".steps is list and tuple"),
        ({"more": 1}, ".more is in one only"),
    ],
)
def test_a_checkpoint_that_holds_something_else_is_told(
    change: dict[str, object], told: str, folders: tuple[Path, Path]
) -> None:
    path = folders[1] / "ckpt" / "last.ckpt"
    torch.save(torch.load(path, weights_only=True) | change, path)
    assert differences(*folders) == [f"ckpt/last.ckpt: {told}"]


def test_files_that_are_missing_new_or_other_are_told(folders: tuple[Path, Path]) -> None:
    whole, resumed = folders
    (whole / "eval_scores_4.jsonl").touch()
    (resumed / ".left.tmp").touch()
    (resumed / "rollouts.1.jsonl").write_text("of the run that was begun anew")
    (resumed / "rollouts.jsonl").write_text('{"step": 0}\n{"step": 2}\n')
    missing, new, other = differences(whole, resumed)
    assert missing == "eval_scores_4.jsonl is missing"
    assert new == ".left.tmp is there too"
    assert other.startswith("rollouts.jsonl: ")
    assert other.endswith("line 2 is the first that differs")


def test_a_campaign_goes_on_where_it_stopped(tmp_path: Path) -> None:
    planned = plan(2, 7, vllm=False)
    done = [Outcome(run.case, run.kills, reached=["update@1"]) for run in planned]
    lines = [json.dumps(vars(outcome)) for outcome in done]
    (tmp_path / "outcomes.jsonl").write_text("\n".join(lines) + "\n")
    # nothing is left to run, and so nothing is
    assert carry_out(planned, tmp_path) == done
    with pytest.raises(SystemExit, match="is of other runs"):
        carry_out(plan(2, 8, vllm=False), tmp_path)


def test_a_resumed_run_has_the_rest_of_the_way_before_it() -> None:
    course = Course(["sanity@0", "start@0", "trained@1", "update@1", "trained@2", "ending@2"], 1.0)
    assert course.place_of([]) == 0
    assert course.place_of(["sanity@0", "start@0"]) == 0
    assert course.marks[course.place_of(["start@1"]) :] == course.marks[2:]


class Sleeper:
    """Starts what sleeps, with a child of its own that is in no group of it."""

    def start(
        self, folder: Path, arguments: list[str], environment: dict[str, str], log: Path
    ) -> "SleepingChild":
        code = (
            "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', "
            "'import time; time.sleep(600)'], start_new_session=True); time.sleep(600)"
        )
        Path(environment["LRLHF_MARKS"]).write_text("start@0\n")
        log.touch()
        return SleepingChild(
            subprocess.Popen(
                [sys.executable, "-c", code], env=environment, cwd=ROOT, start_new_session=True
            )
        )


class SleepingChild:
    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self.pid = process.pid

    def wait(self, timeout: float) -> int | None:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None


def test_a_kill_leaves_no_process_behind(tmp_path: Path) -> None:
    process = Process(tmp_path, Sleeper(), resumes=False)
    process.wait_for_marks()
    start = time.monotonic()
    process.kill_within(0.5, Course(["start@0"], seconds=2.0))
    assert process.wait() == -signal.SIGKILL
    process.wait_for_others()
    assert time.monotonic() - start < 30
    assert process.last_mark == "start@0"
