"""A run that is killed and continued ends as one that nothing disturbed, to the last bit."""

import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.faults.cases import CASES
from tests.faults.compare import differences
from tests.faults.kills import BrokenRunError, Course, Harness, Outcome, Process, carry_out, plan


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("kills"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kills"),
    [
        ("rloo", ["torn:.*.ckpt.tmp@2", "update@7"]),
        pytest.param("rloo", ["validating@8", "rename:final@1"], marks=pytest.mark.exhaustive),
        pytest.param("rloo", ["time:0.5"], marks=pytest.mark.exhaustive),
        ("ppo", ["renamed:*.ckpt@2", "torn:metrics.csv@2"]),
        pytest.param("rloo_media", ["torn:rollouts.jsonl@6"], marks=pytest.mark.exhaustive),
        pytest.param("rloo_turns", ["turn2@3", "turn1@6"], marks=pytest.mark.exhaustive),
        ("rloo_media_turns", ["turn2@3"]),
        pytest.param("ppo_turns", ["turn3@5", "optimizer@6"], marks=pytest.mark.exhaustive),
        ("reward_model", ["trained@5", "ending@9"]),
        ("sft", ["optimizer@5"]),
        pytest.param("dpo", ["torn:.*.ckpt.tmp@2"], marks=pytest.mark.exhaustive),
        pytest.param("process_reward", ["trained@5"], marks=pytest.mark.exhaustive),
        pytest.param(
            "rloo_vllm",
            ["generate@7"],
            marks=[pytest.mark.vllm, pytest.mark.timeout(1500)],
        ),
        pytest.param(
            "rloo_turns_vllm",
            ["turn2@5"],
            marks=[pytest.mark.vllm, pytest.mark.exhaustive, pytest.mark.timeout(1500)],
        ),
        pytest.param(
            "rloo_media_turns_ahead",
            ["turn2@5"],
            marks=[pytest.mark.vllm, pytest.mark.exhaustive, pytest.mark.timeout(1500)],
        ),
    ],
)
def test_a_killed_run_ends_as_if_nothing_had_happened(
    case: str, kills: list[str], harness: Harness
) -> None:
    outcome = harness.disturbed(CASES[case], kills)
    assert outcome.differences == []
    assert len(outcome.reached) == len(kills)


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


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, []),  # a path in a checkpoint counts from its own folder on, and times do not count
        ({"weight": torch.tensor([-0.0, float("nan")])}, [".weight differs"]),
        ({"steps": [1, 3]}, [".steps.1 is 2 and 3"]),
        ({"steps": [1]}, [".steps.1 is in one only"]),
        ({"steps": (1, 2)}, [".steps is list and tuple"]),
        ({"more": 1}, [".more is in one only"]),
    ],
)
def test_a_checkpoint_that_holds_something_else_is_told(
    change: dict[str, object], told: list[str], folders: tuple[Path, Path]
) -> None:
    path = folders[1] / "ckpt" / "last.ckpt"
    torch.save(torch.load(path, weights_only=True) | change, path)
    assert differences(*folders) == [f"ckpt/last.ckpt: {one}" for one in told]


def test_files_that_are_missing_new_or_other_are_told(folders: tuple[Path, Path]) -> None:
    whole, resumed = folders
    (whole / "eval_scores_4.jsonl").touch()
    (resumed / ".left.tmp").touch()
    (resumed / "rollouts.1.jsonl").write_text("of the run that was begun anew")
    (resumed / "rollouts.jsonl").write_text('{"step": 0}\n{"step": 2}\n')
    missing, new, other = differences(whole, resumed)
    assert missing == "eval_scores_4.jsonl is missing"
    assert new == ".left.tmp is there too"
    assert other.endswith("line 2 is the first that differs")


def test_a_campaign_goes_on_where_it_stopped(tmp_path: Path) -> None:
    planned = plan(2, 7, vllm=False)
    done = [Outcome(case, kills, reached=["update@1"]) for case, kills in planned]
    lines = [json.dumps(asdict(outcome)) for outcome in done]
    (tmp_path / "outcomes.jsonl").write_text("\n".join(lines) + "\n")
    # nothing is left to run, and so nothing is
    assert carry_out(planned, tmp_path) == done
    with pytest.raises(SystemExit, match="is of other runs"):
        carry_out(plan(2, 8, vllm=False), tmp_path)


def test_an_instant_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    process = Process(tmp_path, resumes=False, program=[sys.executable, "-c", "pass"])
    with pytest.raises(BrokenRunError, match="killed at update@99, and ended by itself"):
        process.wait_for_kill("update@99", Course([], seconds=1.0))


def test_a_kill_leaves_no_process_behind(tmp_path: Path) -> None:
    # with a child that is in no group of it
    code = (
        "import os, subprocess, sys, time; from pathlib import Path; subprocess.Popen("
        "[sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True); "
        "Path(os.environ['LRLHF_MARKS']).write_text('start@0\\n'); time.sleep(600)"
    )
    process = Process(tmp_path, resumes=False, program=[sys.executable, "-c", code])
    process.wait_for_marks()
    start = time.monotonic()
    process.kill_within(0.5, Course(["start@0"], seconds=2.0))
    assert process.wait() == -signal.SIGKILL
    assert time.monotonic() - start < 30
    assert process.marks == ["start@0"]
