"""The config for one's own pairs on the page of reward models works as it stands there."""

import json
import re
from pathlib import Path

import pytest

from lrlhf.cli import run

PAGE = Path(__file__).parents[2] / "docs" / "algorithms" / "reward_model.md"
CONFIG = re.search(r"```yaml\n(# reward.yaml\n.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


@pytest.mark.usefixtures("_own_log")
def test_the_yaml_trains_on_a_file_of_pairs(
    model_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert CONFIG is not None
    Path("reward.yaml").write_text(CONFIG[1])
    pairs = [
        {"prompt": f"{a} + 1 =", "chosen": str(a + 1), "rejected": str(a + 2)} for a in range(40)
    ]
    Path("pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    small = ["--trainer.fast_dev_run=true", f"--model.model.source={model_folder}"]

    assert run(["fit", "--config", "reward.yaml", *small]) == 0
    assert "`max_steps=1` reached" in caplog.text
