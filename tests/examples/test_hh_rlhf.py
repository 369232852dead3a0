"""The tutorial's script: what it says and how it ends, without training."""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "hh_rlhf.py"
EVALUATED = '{"score": 0.5}\n'


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """Config and folder of each run, which leaves what PPO would; of no.yaml it ends with 2."""
    monkeypatch.chdir(tmp_path)
    begun: list[tuple[str, Path]] = []

    def run(command: list[str], *, cwd: Path, **_: Any) -> "subprocess.CompletedProcess[str]":
        config = next(word for word in command if word.startswith("--config="))
        begun.append((Path(config.partition("=")[2]).name, cwd))
        if "--data.train=" + str(Path("missing.jsonl").resolve()) in command:
            return subprocess.CompletedProcess(command, 2)
        folder = cwd / "runs" / "ppo_text"
        folder.mkdir(parents=True)
        (folder / "eval_scores_0.jsonl").write_text(EVALUATED)
        names = ("rollout/score", "eval/score", "kl/sequence", "kl/coef")
        (folder / "metrics.csv").write_text(f"step,{','.join(names)}\n1,1,1,1,1\n")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return begun


def script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["hh_rlhf.py", *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_a_run_that_fails_ends_the_script_with_its_status(
    runs: list[tuple[str, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        script(monkeypatch, "missing.jsonl")
    assert ended.value.code == 2
    assert runs == [("reward_hh.yaml", Path())]
    assert capsys.readouterr().out == ""


def test_a_reward_model_that_is_there_is_used_and_each_run_says_its_folder(
    runs: list[tuple[str, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("runs/reward_hh/export/final").mkdir(parents=True)
    script(monkeypatch, "pairs.jsonl", "--seeds", "0", "3")
    folders = [Path("runs/hh_seed_0"), Path("runs/hh_seed_3")]
    assert runs == [("ppo_text.yaml", folder) for folder in folders]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("uses the reward model that is there, runs/reward_hh/export/final;")
    assert said[1:3] == ["in runs/hh_seed_0:", "in runs/hh_seed_3:"]
    assert said[-1] == "0 minutes; curves of all seeds: runs/hh_curves.png"
    assert Path("runs/hh_curves.png").is_file()
