"""The page for users of Lightning: its code runs in one go, and so does the plain LightningCLI."""

from __future__ import annotations

import csv
import json
import re
import runpy
from pathlib import Path

import pytest
import yaml

from lrlhf.options.errors import ValidationError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from_lightning.md").read_text(encoding="utf-8")


def test_the_code_of_the_page_runs_from_top_to_bottom(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {"model": model_folder}
    for number, block in enumerate(blocks):
        code = compile(block, f"from_lightning.md, block {number}", "exec")
        if "# AttributeError: …" in block:
            with pytest.raises(AttributeError, match=r"build another, RLOO\(\.\.\., num_gen"):
                exec(code, names)
        else:
            exec(code, names)
    assert len(list(Path("runs/second").rglob("metrics.csv"))) == 1
    assert len(list(Path("runs/second").rglob("events.out.tfevents.*"))) == 1


@pytest.fixture
def config(model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n} + 1 =", "answer": f"{n + 1}"} for n in range(4)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rewards = {"class_path": "lrlhf.rewards.Rewards", "init_args": {"functions": ["exact_match"]}}
    settings = {
        "model": {
            "policy": model_folder,
            "rewards": rewards,
            "num_generations": 2,
            "sampling": {"max_new_tokens": 2},
        },
        "data": {"train": "rows.jsonl", "batch_size": 2},
        "trainer": {"accelerator": "cpu", "max_steps": 2, "default_root_dir": "run"},
    }
    path = Path("main.yaml")
    path.write_text(yaml.safe_dump(settings))
    return path


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["main.py", "fit", *arguments])
    runpy.run_path(str(ROOT / "examples" / "main.py"), run_name="__main__")


@pytest.mark.filterwarnings("ignore:.*holds checkpoints of an earlier run")
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_a_plain_command_line_trains_twice_in_a_folder(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        main(monkeypatch, "--config", str(config))
        # its config names no classes: what `lrlhf fit` would refuse is not advised
        next_steps = capsys.readouterr().out.partition("next:")[2]
        assert "lrlhf inspect run" in next_steps
        assert "config.yaml" not in next_steps
        with Path("run/metrics.csv").open() as handle:
            assert [row["step"] for row in csv.DictReader(handle)] == ["1", "2"]
    assert Path("run/export/final/model.safetensors").is_file()


def test_a_misspelt_option_is_answered_with_the_nearest(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValidationError, match=r"did you mean model\.sampling\.max_new_tokens\?"):
        main(monkeypatch, "--config", str(config), "--model.samplng.max_new_tokens=3")
