"""Functions of the user's own, beside the config or in the working folder."""

import sys
from pathlib import Path

import pytest
import yaml

from lrlhf.cli import run
from tests.cli.experiment import experiment


@pytest.mark.parametrize("folder", ["configs", "."])
def test_a_reward_beside_the_config_or_in_the_working_folder_is_found(
    model_folder: str, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    # as the installed command starts, and not `python -m lrlhf`
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])
    name = f"own_rewards_{len(folder)}"
    for place in ("configs", folder):
        Path(place).mkdir(exist_ok=True)
    code = "def length(completions):\n    return [float(len(each)) for each in completions]\n"
    Path(folder, f"{name}.py").write_text(code)
    Path("rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    options = {"policy": model_folder}
    config = experiment(
        "RLOO", options, {"train": "rows.jsonl", "batch_size": 2}, reward=f"{name}.length"
    )
    Path("configs/run.yaml").write_text(yaml.safe_dump(config))
    assert run(["fit", "--config", "configs/run.yaml"]) == 0


@pytest.mark.parametrize("reward", ["no_such_module.reward", "broken_rewards.reward"])
def test_an_import_that_fails_says_where_it_looked(
    model_folder: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    reward: str,
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("broken_rewards.py").write_text("import no_such_module as reward\n")
    Path("rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    config = experiment(
        "RLOO", {"policy": model_folder}, {"train": "rows.jsonl", "batch_size": 2}, reward=reward
    )
    Path("configs").mkdir()
    Path("configs/run.yaml").write_text(yaml.safe_dump(config))
    assert run(["fit", "--config", "configs/run.yaml"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(
        f"{reward!r} cannot be imported: No module named 'no_such_module'; looked for it in the "
        f"installed packages and in {Path('configs').absolute()}, {Path().absolute()}"
    )
