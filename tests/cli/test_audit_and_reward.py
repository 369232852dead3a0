"""`lrlhf audit` and `lrlhf reward` from the command line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lrlhf.__main__ import main
from lrlhf.cli.checks.data_rows import taken_from
from lrlhf.cli.checks.models import check_models
from lrlhf.models import CausalLM, ScoreModel
from tests.apps.lab.texts import clean_pairs
from tests.cli.experiment import experiment

REWARDS = """\
def digits(completions, answer):
    return [float(text == right) for text, right in zip(completions, answer)]
"""


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    for spec in (CausalLM, ScoreModel):
        monkeypatch.setattr(spec, "load", load)


def write_rows(name: str, rows: list[dict[str, Any]]) -> str:
    Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return name


@pytest.fixture
def pairs(model_folder: str) -> str:
    rows = clean_pairs(40)
    write_rows("pairs.jsonl", [*rows, rows[0]])
    config = experiment("RewardModel", {"model": model_folder}, {"train": "pairs.jsonl"})
    Path("pairs.yaml").write_text(yaml.safe_dump(config))
    return "pairs.yaml"


@pytest.fixture
def prompts(model_folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    Path("own_rewards_of_lab.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    write_rows("prompts.jsonl", [{"prompt": "1 + 1 =", "answer": "2"}])
    config = experiment(
        "RLOO", {"policy": model_folder}, {"train": "prompts.jsonl"},
        reward="own_rewards_of_lab.digits",
    )  # fmt: skip
    Path("prompts.yaml").write_text(yaml.safe_dump(config))
    return "prompts.yaml"


def test_audit_prints_and_writes_what_it_finds(
    pairs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", pairs, "--json", "out/audit.json", "--html", "out/audit.html"]

    assert main(["audit", *arguments]) == 0

    said = " ".join(capsys.readouterr().out.split())
    assert "warning exact duplicates 1 41 2.44%" in said
    # the tiny model reads 256 tokens, a byte each
    assert "error longer than the model's context" in said
    report = json.loads(Path("out/audit.json").read_text())
    named = {finding["name"]: finding for finding in report["findings"]}
    assert named["exact duplicates"]["rows"] == [
        {"split": "train", "place": "pairs.jsonl:41", "detail": "same as pairs.jsonl:1"}
    ]
    assert "pairs.jsonl:41" in Path("out/audit.html").read_text()
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data.train", "missing.jsonl"], "there is no file or folder 'missing.jsonl'"),
        (["--json", "."], "--json is .; give the name of a file in a folder"),
        (["--html", "pairs.jsonl/audit.html"], "--html is pairs.jsonl/audit.html; give the name"),
    ],
)
def test_audit_refuses_what_it_cannot_read_or_write(
    pairs: str, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["audit", "--config", pairs, *arguments]) == 2

    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert said in error


@pytest.mark.parametrize(("name", "refuses"), [("DPO", True), ("RewardModel", False)])
def test_data_are_looked_at_as_their_module_takes_them(
    model_folder: str, name: str, refuses: bool
) -> None:
    option = "policy" if name == "DPO" else "model"
    model = {"class_path": f"lrlhf.modules.{name}", "init_args": {option: model_folder}}
    trained = check_models(model)
    assert trained is not None
    assert taken_from(model, trained).answers_only is refuses


def test_reward_runs_the_rewards_of_a_config_without_its_policy(
    prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": "1 + 1 =", "completions": ["2", "3"], "answer": "2"},
        {"prompt": "2 + 2 =", "completions": ["4", "4"], "answer": "4"},
    ]
    answers = write_rows("answers.jsonl", rows)

    assert main(["reward", "--config", prompts, answers, "--json", "rewards.json"]) == 0

    said = capsys.readouterr().out
    assert "4 responses to 2 prompts; lengths in tokens" in said
    assert "This is an audit" in said
    (part, score) = json.loads(Path("rewards.json").read_text())["parts"]
    assert (part["name"], part["mean"], score["mean"]) == ("digits", 0.75, 0.75)
    assert (part["no_signal"]["count"], part["no_signal"]["of"]) == (1, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        ["answers.jsonl", "--config", "prompts.yaml", "--model.reference.kl_coef=0"],
        ["--config=prompts.yaml", "--json=out.json", "answers.jsonl"],
        # values that look like options, and options that look like values
        ["--config", "prompts.yaml", "--trainer.max_steps", "-1", "answers.jsonl"],
        ["--config", "prompts.yaml", "--data.train", "prompts.jsonl", "answers.jsonl"],
        ["--config", "prompts.yaml", "--", "answers.jsonl"],
    ],
)
def test_the_file_of_responses_stands_anywhere_among_the_options(
    prompts: str, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert prompts == "prompts.yaml"
    write_rows("answers.jsonl", [{"prompt": "1 + 1 =", "completion": "2", "answer": "2"}])

    assert main(["reward", *arguments]) == 0

    assert "1 responses to 1 prompts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.jsonl"], "there is no file missing.jsonl"),
        ([], "responses: required, but missing"),
        (["bare.jsonl", "prompts.jsonl"], "prompts.jsonl"),
        (["prompts.jsonl"], "prompts.jsonl, row 1: there is no column completion"),
        (["bare.jsonl"], "reward function 'digits': reward function 'digits' takes an argument"),
        (["bare.jsonl", "--prompts_per_call", "0"], "--prompts_per_call is 0; give 1 or more"),
    ],
)
def test_reward_refuses_what_it_cannot_use(
    prompts: str, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    write_rows("bare.jsonl", [{"prompt": "1 + 1 =", "completion": "2"}])

    assert main(["reward", "--config", prompts, *arguments]) == 2

    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert said.removeprefix("reward function 'digits': ") in error


def record(step: int, group: int, score: float | None, completion: str) -> dict[str, Any]:
    return {
        "step": step, "group": group, "rank": 0, "prompt": f"prompt {group}",
        "completion": completion, "score": score, "rewards": {"digits": score, "extra": 0.0},
        "length": len(completion), "columns": {"answer": "2"}, "token_ids": [1] * len(completion),
    }  # fmt: skip


def write_run(folder: str) -> str:
    Path(folder).mkdir()
    rows = [
        record(step, group, float(k * step), "x" * (k + 1))
        for step in (1, 2) for group in range(3) for k in range(4)
    ]  # fmt: skip
    rows[12] = record(2, 0, None, "x")
    write_rows(f"{folder}/rollouts.jsonl", rows)
    return folder


def test_reward_tells_by_step_what_a_run_said(capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run("run")

    assert main(["reward", run, "--json", "rewards.json", "--html", "rewards.html"]) == 0

    said = capsys.readouterr().out
    assert "24 responses to 6 prompts" in said
    assert "extra gives every response the same value, 0" in said
    first, second = json.loads(Path("rewards.json").read_text())["steps"]
    # 0, 1, 2, 3 in each of three prompts; then 0, 2, 4, 6, one 0 of which is missing
    assert (first["step"], first["responses"], first["means"]["score"]) == (1, 12, 1.5)
    assert first["with_length"] == pytest.approx(1.0)
    assert (first["missing"], first["no_signal"]) == (0.0, 0.0)
    assert second["means"]["score"] == pytest.approx(36 / 11)
    assert second["missing"] == pytest.approx(1 / 12)
    assert "Signal by step" in Path("rewards.html").read_text()


def test_a_step_without_two_lengths_has_no_correlation_with_length(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = write_run("run")
    write_rows(f"{run}/rollouts.jsonl", [record(1, 0, float(k), "x") for k in range(4)])

    assert main(["reward", run]) == 0

    said = capsys.readouterr().out
    rows = {" ".join(line.split()) for line in said.splitlines()}
    assert {"prompts without signal 0", "rank correlation of score and length"} <= rows
    assert "nan" not in said


def test_rewards_of_a_config_score_the_responses_of_a_run_anew(
    prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run("run")

    assert main(["reward", "--config", prompts, run]) == 0

    said = capsys.readouterr().out
    assert "24 responses to 6 prompts" in said
    assert "digits gives every response the same value, 0" in said


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere", "there is no folder nowhere"),
        ("empty", "empty holds no metrics.csv, rollouts.jsonl"),
        ("without", "without has no rollouts.jsonl"),
        ("broken", "line 1 is no record of a rollout (KeyError: 'score')"),
        ("broken/rollouts.jsonl", "lrlhf reward --config FILE broken/rollouts.jsonl"),
    ],
)
def test_reward_refuses_what_is_no_run(
    capsys: pytest.CaptureFixture[str], path: str, said: str
) -> None:
    for name in ("empty", "without", "broken"):
        Path(name).mkdir()
    Path("without/metrics.csv").write_text("step,loss\n1,2\n")
    write_rows(
        "broken/rollouts.jsonl",
        [{"step": 1, "prompt": "", "completion": "", "group": 0, "length": 1}],
    )

    assert main(["reward", path]) == 2

    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert said in error
    assert "\n" not in error


def test_the_rewards_of_a_run_are_read_without_torch() -> None:
    run = write_run("run")
    program = (
        "import sys; from lrlhf.__main__ import main; main(['reward', sys.argv[1]]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'lightning')))"
    )

    done = subprocess.run([sys.executable, "-c", program, run], capture_output=True, check=False)

    assert done.returncode == 0, done.stderr
