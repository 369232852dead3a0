"""`lrlhf replay` on the dump of a run that `lrlhf fit` made."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lrlhf.cli import run
from tests.cli.experiment import experiment

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def letter_share(completions: list[str]) -> list[float]:
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


@pytest.fixture
def config(model_folder: str) -> dict[str, Any]:
    rows = [{"prompt": f"say {word}"} for word in "abcd"]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {
        "policy": model_folder,
        "sampling": {"max_new_tokens": 4},
        "optimizer": {"lr": 0.1},
        "update": {"loss": "token_clip", "num_iterations": 2},
        "guard": {"max_ratio": 1.5},
    }
    data = {"train": "rows.jsonl", "batch_size": 2}
    return experiment("RLOO", options, data, reward=f"{__name__}.letter_share")


def test_a_dump_of_fit_is_repeated_by_its_command(config: dict[str, Any], capsys) -> None:
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert run(["fit", "--config", "run.yaml"]) == 0
    (dump,) = Path("runs/run/dumps").iterdir()
    about = json.loads((dump / "anomaly.json").read_text())
    assert about["command"] == f"lrlhf replay {dump.absolute()}"
    assert about["command"] in capsys.readouterr().err
    assert [one["kind"] for one in about["anomalies"]] == ["ratio"]
    records = [json.loads(line) for line in (dump / "records.jsonl").read_text().splitlines()]
    assert [record["row"] for record in records] == [0, 1, 2, 3]
    # its config names code of the user's, who says so
    assert run(["replay", str(dump)]) == 2
    assert (
        f"config.yaml: model.init_args.rewards.init_args.functions[0] would import {__name__}"
        in (capsys.readouterr().err)
    )
    assert run(["replay", str(dump), "--trust_remote_code"]) == 0
    shown = capsys.readouterr().out
    assert "\nreproduced" in shown
    assert "say " in shown
    # what went wrong is no longer wrong under another limit
    Path("overlay.yaml").write_text("model:\n  init_args:\n    guard:\n      max_ratio: null\n")
    flags = ["--trust_remote_code", "--config", "overlay.yaml"]
    assert run(["replay", str(dump), *flags]) == 3
    assert "not reproduced" in capsys.readouterr().out


def test_a_command_line_that_cannot_work_says_why(capsys) -> None:
    assert run(["replay"]) == 2
    assert "needs the folder of a dump" in capsys.readouterr().err
    assert run(["replay", "nowhere"]) == 2
    assert "nowhere is no dump: there is no such folder" in capsys.readouterr().err
    Path("bare").mkdir()
    Path("bare/anomaly.json").write_text('{"format": "lrlhf-dump-4"}')
    assert run(["replay", "bare"]) == 2
    assert "replay_dump(module, folder)" in capsys.readouterr().err
