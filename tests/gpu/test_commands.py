"""The commands where there is a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lrlhf.cli import run
from lrlhf.types import PreferenceBatch, SequenceBatch
from tests.cli.experiment import experiment
from tests.cli.test_replay import letter_share

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")

REWARD = f"{letter_share.__module__}.{letter_share.__name__}"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(model_folder: str, accelerator: str, **options: Any) -> list[str]:
    rows = [{"prompt": f"say {word}"} for word in "abcd"]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {"policy": model_folder, "sampling": {"max_new_tokens": 4}, **options}
    data = {"train": "rows.jsonl", "batch_size": 2}
    config = experiment("RLOO", settings, data, reward=REWARD, accelerator=accelerator)
    Path("run.yaml").write_text(yaml.safe_dump(config))
    return ["--config", "run.yaml"]


@pytest.mark.gpu_lines(
    "lrlhf.cli.checks.trainer_options",
    "lrlhf.trainer_options",
    "lrlhf.apps.plan.memory._is_on_gpu",
    "lrlhf.apps.plan.memory",
    "lrlhf.apps.plan.times",
    "lrlhf.apps.plan.plan_command",
    "lrlhf.cli.config_entries._devices_here",
    "lrlhf.modules.checks.prepare_trainer",
)
def test_fit_check_and_plan(model_folder: str, accelerator: str, capsys) -> None:
    flags = written(model_folder, accelerator)
    assert run(["check", *flags]) == 0
    assert run(["plan", *flags, "--trainer.devices", "auto"]) == 0
    shown = capsys.readouterr().out
    if accelerator == "gpu":
        assert f"{torch.cuda.device_count()}" in shown
        assert "the GPUs of this machine" in shown
    assert run(["plan", *flags, "--gpus", "2", "--gpu", "h100"]) == 0
    assert "one iteration, 2 × h100" in capsys.readouterr().out
    assert run(["fit", *flags]) == 0
    assert Path("runs/run").is_dir()


@pytest.mark.gpu_lines("lrlhf.cli.checks.trainer_options.check_devices")
def test_more_gpus_than_there_are_is_a_mistake(model_folder: str, capsys) -> None:
    flags = written(model_folder, "gpu")
    count = torch.cuda.device_count() + 1
    assert run(["fit", *flags, "--trainer.devices", str(count)]) == 2
    assert f"this machine has {count - 1} GPU(s)" in capsys.readouterr().err


@pytest.mark.gpu_lines("lrlhf.guard.dump_replay", "lrlhf.functional.linear_logprobs._product_dtype")
def test_a_dump_is_reproduced(model_folder: str, accelerator: str, capsys) -> None:
    flags = written(
        model_folder,
        accelerator,
        optimizer={"lr": 0.1},
        update={"loss": "token_clip", "num_iterations": 2},
        guard={"max_ratio": 1.5},
    )
    assert run(["fit", *flags, "--trainer.precision", "32-true"]) == 0
    (dump,) = Path("runs/run/dumps").iterdir()
    assert run(["replay", str(dump)]) == 0
    assert "\nreproduced" in capsys.readouterr().out


@pytest.mark.gpu_lines("lrlhf.cli.trained_policy._device")
def test_generate_answers_on_the_device(model_folder: str, device: torch.device) -> None:
    Path("prompts.jsonl").write_text('{"prompt": "say a"}\n{"prompt": "say b"}\n')
    answers = []
    for number, place in enumerate(("cpu", str(device), "auto")):
        given = [model_folder, "prompts.jsonl", f"--output={number}.jsonl", f"--device={place}"]
        assert run(["generate", *given, "--max_new_tokens=5", "--dtype=float32"]) == 0
        lines = Path(f"{number}.jsonl").read_text().splitlines()
        answers.append([json.loads(line)["completion"] for line in lines])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.gpu_lines("lrlhf.types.PreferenceBatch.to")
def test_labels_leave_the_host_in_time(device: torch.device) -> None:
    ids = torch.ones(2, 3, dtype=torch.long)
    side = SequenceBatch(input_ids=ids, attention_mask=ids.bool(), response_mask=ids.bool())
    batch = PreferenceBatch(
        candidate0=side, candidate1=side, labels=torch.ones(2, 1), info=({}, {})
    )
    moved = batch.to(device)
    assert moved.labels.device.type == device.type
    assert moved.host is None if device.type == "cpu" else moved.host.labels is batch.labels
