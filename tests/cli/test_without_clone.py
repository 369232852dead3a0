"""Configs that come with lrlhf, and configs that are written for a file of the user's."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lrlhf.__main__ import main
from lrlhf.foreign_files import foreign_code

ROOT = Path(__file__).parents[2]
CHAT = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "2"}]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config_of(
    row: dict[str, Any], model: str, *flags: str, rows: int = 40
) -> tuple[dict[str, Any], str]:
    """Write a config for rows, have `lrlhf check` look at it, and return it read and as text."""
    Path("rows.jsonl").write_text(f"{json.dumps(row)}\n" * rows)
    assert main(["init", "rows.jsonl", "--model", model, "--output", "my.yaml", *flags]) == 0
    assert main(["check", "--config", "my.yaml"]) == 0
    text = Path("my.yaml").read_text()
    return yaml.safe_load(text), text


def test_a_name_stands_for_a_shipped_config_and_its_overlay(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--config", "lrlhf:quickstart", "--config=lrlhf:engine/transformers.yaml"]
    assert main(["fit", *flags, "--print_config"]) == 0
    named = yaml.safe_load(capsys.readouterr().out)
    files = [
        f"--config={ROOT}/configs/{name}.yaml" for name in ("quickstart", "engine/transformers")
    ]
    assert main(["fit", *files, "--print_config"]) == 0
    assert named == yaml.safe_load(capsys.readouterr().out)
    assert named["trainer"]["max_steps"] == 50
    assert named["model"]["init_args"]["engine"]["class_path"].endswith("TransformersEngine")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("quikstart", "quickstart"), ("vllm", "engine/vllm"), ("overlays/fsdp", "strategy/fsdp")],
)
@pytest.mark.parametrize("command", ["fit --config", "launch --cluster", "configs"])
def test_a_misspelt_name_gets_the_nearest(
    capsys: pytest.CaptureFixture[str], command: str, name: str, nearest: str
) -> None:
    given = name if command == "configs" else f"lrlhf:{name}"
    assert main([*command.split(), given]) == 2
    assert f"'{name}'" in (error := capsys.readouterr().err)
    assert f"did you mean '{nearest}'?" in error


def test_configs_are_listed_and_copied_over_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    listed = capsys.readouterr().out.splitlines()
    files = {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml")}
    assert sorted(line.split()[0] for line in listed) == sorted(
        file.with_suffix("").as_posix() for file in files
    )
    assert main(["configs", "sft", "lrlhf:engine/vllm", "--output", "mine"]) == 0
    assert Path("mine/sft.yaml").read_bytes() == (ROOT / "configs/sft.yaml").read_bytes()
    Path("mine/sft.yaml").write_text("changed")
    Path("mine/vllm.yaml").unlink()
    assert main(["configs", "engine/vllm", "sft", "--output", "mine"]) == 2
    assert "mine/sft.yaml is there already" in capsys.readouterr().err
    assert Path("mine/sft.yaml").read_text() == "changed"
    assert not Path("mine/vllm.yaml").exists()


@pytest.mark.parametrize(
    ("row", "module", "data", "options"),
    [
        ({"chosen": "2? 2", "rejected": "2? 3"}, "RewardModel", "PreferenceDataModule", {}),
        ({"messages": CHAT}, "SFT", "SupervisedDataModule", {}),
        (
            {"instruction": "2?", "output": "2"},
            "SFT",
            "SupervisedDataModule",
            {"prompt_column": "instruction", "completion_column": "output"},
        ),
        ({"text": "2"}, "SFT", "SupervisedDataModule", {}),
        (
            {"prompt": "2?", "completions": ["2"], "labels": [True]},
            "ProcessRewardModel",
            "StepwiseDataModule",
            {},
        ),
        (
            {"question": "2?", "answer": "so #### 2"},
            "RLOO",
            "PromptDataModule",
            {"prompt_column": "question"},
        ),
    ],
    ids=["pairs", "chats", "instructions", "texts", "steps", "questions"],
)  # fmt: skip
def test_rows_say_what_they_fit_and_check_finds_no_mistake(
    model_folder: str, row: dict[str, Any], module: str, data: str, options: dict[str, str]
) -> None:
    config, text = config_of(row, model_folder)
    assert config["model"]["class_path"] == module
    assert config["data"]["class_path"] == data
    arguments = config["data"]["init_args"]
    assert {name: value for name, value in arguments.items() if "_column" in name} == options
    # the tenth of 40 rows, and the model's tokenizer has a template for plain prompts
    assert arguments["val_size"] == 4
    assert arguments.get("as_chat", False) == ("text" not in row and "messages" not in row)
    assert "{{" not in text


def test_answers_choose_the_reward_and_prompts_without_ask_for_one(
    model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for answer, kind in {"1,200": "NumericAnswer", "Rome": "ExactMatch"}.items():
        config, _ = config_of({"prompt": "?", "solution": answer}, model_folder)
        (reward,) = config["model"]["init_args"]["rewards"]["init_args"]["functions"]
        assert reward == {"class_path": kind, "init_args": {"answer_column": "solution"}}
        Path("my.yaml").unlink()
    with_reward = ("--reward", "repetition_penalty")
    config, _ = config_of({"prompt": "?"}, model_folder, *with_reward, rows=3)
    assert config["model"]["init_args"]["rewards"]["init_args"]["functions"] == [with_reward[1]]
    # too few to hold any out, and fewer than a batch
    assert "val_size" not in config["data"]["init_args"]
    assert config["data"]["init_args"]["batch_size"] == 3
    assert main(["init", "rows.jsonl", "--output", "other.yaml"]) == 2
    assert "give --reward" in capsys.readouterr().err
    assert not Path("other.yaml").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("row.jsonl", "did you mean 'rows.jsonl'?"),
        ("rows.jsonl --task dopo", "did you mean 'dpo'?"),
        ("rows.jsonl --task sft", "they fit reward_model, dpo, kto, rloo"),
        ("rows.jsonl --output taken.yaml", "taken.yaml is there already"),
        # half of a prompt would be lost
        ("alpaca.jsonl", "no task fits its rows (instruction, input, output)"),
    ],
)
def test_what_cannot_be_written_says_why(
    capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    Path("rows.jsonl").write_text('{"prompt": "2?", "chosen": "2", "rejected": "3"}\n')
    Path("alpaca.jsonl").write_text('{"instruction": "a", "input": "b", "output": "c"}\n')
    Path("taken.yaml").write_text("mine")
    assert main(["init", *flags.split()]) == 2
    assert message in capsys.readouterr().err
    assert Path("taken.yaml").read_text() == "mine"


def test_a_foreign_config_does_not_decide_to_run_an_example() -> None:
    assert [*foreign_code({"train": {"class_path": "lrlhf.examples.tones.Tones"}})]
    assert [*foreign_code({"train": {"class_path": "lrlhf.datamodules.ReasoningGym"}})] == []
