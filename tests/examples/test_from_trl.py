"""The page for users of TRL: its scripts are the files, do the same and run."""

import ast
import csv
import json
import re
import runpy
import shutil
from pathlib import Path

import pytest

from lrlhf.cli import run

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "from_trl"


def test_the_page_shows_the_files_as_they_are() -> None:
    page = (ROOT / "docs" / "from_trl.md").read_text()
    blocks = re.findall(r"^```(?:python|yaml)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert blocks == [
        (SCRIPTS / name).read_text()
        for name in ("rloo_trl.py", "rloo_lrlhf.py", "rloo.yaml", "reward_lrlhf.py")
    ]


def test_data_and_rewards_are_the_same_lines_in_both() -> None:
    ours, theirs = (functions_of(SCRIPTS / f"rloo_{name}.py") for name in ("lrlhf", "trl"))
    assert ours == theirs
    assert [*ours] == ["sums", "right", "number"]


@pytest.mark.slow
def test_script_and_config_train_alike(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["rloo_lrlhf.py", model_folder])
    script = runpy.run_path(str(SCRIPTS / "rloo_lrlhf.py"), run_name="__main__")
    for name, rows in script["sums"]().items():
        rows.to_json(f"{name}.jsonl")
    for name in ("rloo.yaml", "rloo_lrlhf.py"):
        shutil.copy(SCRIPTS / name, tmp_path)
    status = run(["fit", "--config", "rloo.yaml", "--model.policy", model_folder])
    assert status == 0
    assert said(Path("runs/rloo_lrlhf_1")) == said(Path("runs/rloo_yaml"))
    assert len(said(Path("runs/rloo_lrlhf_1"))) == 20 * 8 * 4  # iterations, prompts, generations
    with Path("runs/rloo_lrlhf_1/metrics.csv").open() as file:
        scored = [row for row in csv.DictReader(file) if row["rewards/right/mean"]]
    assert len(scored) == 20
    for folder in (Path("runs/rloo_lrlhf_1"), Path("runs/rloo_yaml")):
        assert (folder / "export" / "final" / "model.safetensors").exists()
        assert (folder / "checkpoints" / "last.ckpt").exists()


@pytest.mark.slow
def test_the_script_of_a_reward_model_runs(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["reward_lrlhf.py", model_folder])
    script = runpy.run_path(str(SCRIPTS / "reward_lrlhf.py"), run_name="__main__")
    assert script["trainer"].global_step == 20
    assert Path("runs/reward_lrlhf/export/final/model.safetensors").exists()
    assert "reward_model/accuracy" in Path("runs/reward_lrlhf/metrics.csv").read_text()


def functions_of(script: Path) -> dict[str, str]:
    """Return the code of each function, by name."""
    nodes = ast.parse(script.read_text()).body
    return {node.name: ast.unparse(node) for node in nodes if isinstance(node, ast.FunctionDef)}


def said(folder: Path) -> list[str]:
    """Return all responses of a run."""
    lines = (folder / "rollouts.jsonl").read_text().splitlines()
    return [json.loads(line)["completion"] for line in lines]
