"""`lrlhf compare` on the terminal, as JSON, as a page, and with models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lrlhf.__main__ import main
from lrlhf.cli import run
from tests.apps.lab.compare.runs import scored, write_run
from tests.cli.experiment import experiment

Capture = pytest.CaptureFixture[str]
A = [0.0] * 12 + [1.0] * 12
B = [0.0] * 3 + [1.0] * 21


@pytest.fixture(autouse=True)
def _four_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for seed in (1, 2):
        config = {"seed_everything": seed, "model": {"lr": 1}}
        write_run(f"runs/a_seed{seed}", scored(A), config=config)
        changed = {"seed_everything": seed, "model": {"lr": 2}}
        write_run(f"runs/b_seed{seed}", scored(B[seed:] + B[:seed]), config=changed)


def out(capsys: Capture, *arguments: str) -> str:
    assert run(["compare", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert max(map(len, shown.out.splitlines())) <= int(os.environ.get("COLUMNS", 80))
    return shown.out


def refused(capsys: Capture, *arguments: str) -> str:
    assert run(["compare", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    return shown.err


def test_the_first_sentence_is_the_answer(capsys: Capture) -> None:
    text = out(capsys, "runs/a_seed1", "runs/b_seed1")
    first = " ".join(text.split("\n\n")[0].split())
    assert first.startswith("B is better than A in score by 37.5 points (95 % interval ")
    assert first.endswith(
        "one seed each: this speaks of these two checkpoints, not of the recipes."
    )
    assert "A: runs/a_seed1 (step 1)" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert any(line.startswith("score 24 50.0 % 87.5 % +37.5 12.5 to ") for line in lines)
    assert "model.lr 1 2" in lines


@pytest.mark.parametrize(("columns", "shown"), [("200", "a row each"), ("80", "a column each")])
def test_nothing_of_what_the_runs_cost_is_cut_off(
    columns: str, shown: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    phases = ("generate", "logprob", "reward", "update", "sync")
    for run_of in ("a_seed1", "b_seed1"):
        folder = Path("runs") / run_of
        (folder / "metrics.csv").write_text("step,rollout/score\n1,0.5\n")
        headings = ",".join(f"perf/{phase}_s" for phase in phases)
        row = "1,86400,2,3,134,71.5,3.5"
        (folder / "timings.csv").write_text(f"step,{headings},perf/memory_gib\n{row}\n")
        (folder / "rollouts.jsonl").write_text(json.dumps({"step": 1, "length": 7678123}) + "\n")
    lines = [line.split() for line in out(capsys, "runs/a_seed1", "runs/b_seed1").splitlines()]
    # 86,400 + 2 + 3 + 134 + 71.5 seconds
    numbers = ["1", "1", "7,678,123", "86,610.5", "86,400.0", "2.0", "3.0", "134.0", "71.5", "3.5"]
    if shown == "a row each":
        assert [line[2:] for line in lines if line[:1] in (["A"], ["B"])][-2:] == [numbers] * 2
        return
    names = ["steps", "responses", "tokens", "seconds", *(f"{phase} s" for phase in phases)]
    rows = [
        [*name.split(), one, one] for name, one in zip([*names, "peak GiB"], numbers, strict=True)
    ]
    assert lines[-len(rows) :] == rows
    assert any(line[:2] == ["run", "A"] and line[3] == "B" for line in lines)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--a", "runs/a_seed1", "runs/a_seed2", "--b", "runs/b_seed1", "runs/b_seed2"],
        ["--against", "runs/a_seed*", "--b", "runs/b_seed1", "--b", "runs/b_seed2"],
        ["runs/a_seed*", "runs/b_seed*"],
        ["runs/b_seed*", "--against", "runs/a_seed?"],
    ],
)
def test_sides_of_several_seeds_are_given_in_several_ways(
    arguments: list[str], capsys: Capture
) -> None:
    text = " ".join(out(capsys, *arguments).split())
    assert "2 seeds each: this speaks of the recipes" in text
    assert "A: runs/a_seed1 (step 1), runs/a_seed2 (step 1)" in text


def test_json_has_every_figure(capsys: Capture) -> None:
    text = out(capsys, "runs/a_seed1", "runs/b_seed1", "--json", "new/all.json", "--by", "level")
    told = json.loads(Path("new/all.json").read_text())
    (found,) = told["comparisons"]
    assert found["answer"] == " ".join(text.split("\n\n")[0].split())
    assert found["main"]["means"] == [0.5, 0.875]
    assert found["main"]["difference"]["value"] == 0.375
    assert [row["subset"] for row in found["subsets"]] == ["level=easy", "level=hard"]
    assert found["config"]["changes"] == [{"option": "model.lr", "a": "1", "b": "2"}]
    assert len(found["prompts"]) == 24
    assert found["prompts"][9] == {"key": ["", "", "val.jsonl", "10"], "a": [0.0], "b": [1.0]}
    assert {need["difference"] for need in found["power"]["needs"]} == {0.01, 0.02, 0.05, 0.1}


def test_a_page_has_the_answer_and_the_prompts(capsys: Capture) -> None:
    hostile = scored(B, lambda row: {"completion": "</script><img src=x onerror=alert(1)>"})
    write_run("runs/b_seed1", hostile)
    out(capsys, "runs/a_seed1", "runs/b_seed1", "--html", "page.html")
    page = Path("page.html").read_text()
    assert "B is better than A in score by 37.5 points" in page
    assert "question 10" in page
    assert "<img src=x" not in page
    assert "&lt;img src=x onerror" in page


def test_mistakes_are_told_in_one_line(capsys: Capture) -> None:
    assert "needs two sides" in refused(capsys, "runs/a_seed1")
    assert "needs two sides, up to 26" in refused(capsys, *(f"r{one}" for one in range(27)))
    assert "is given twice" in refused(capsys, "runs/a_seed1", "runs/a_seed1/")
    assert "there is no folder runs/c" in refused(capsys, "runs/a_seed1", "runs/c")
    assert "nothing fits runs/c*" in refused(capsys, "runs/a_seed1", "runs/c*")
    assert "is given twice" in refused(capsys, "runs/a_seed*", "runs/a_seed1")
    assert "step is 'lsat'" in refused(capsys, "runs/a_seed1", "runs/b_seed1", "--step", "lsat")
    told = refused(capsys, "runs/a_seed1", "runs/b_seed1", "--step", "3")
    assert told == "error: runs/a_seed1 has no evaluation of step 3; there are 1\n"
    Path("runs/b_seed1/eval_scores_1.jsonl").write_text('{"score": 1}\n{"score\n')
    told = refused(capsys, "runs/a_seed1", "runs/b_seed1")
    assert "runs/b_seed1/eval_scores_1.jsonl, line 2 is no JSON" in told
    with pytest.raises(SystemExit) as ended:
        main(["compare", "runs/a_seed1", "runs/b_seed1", "--difference", "-1"])
    assert ended.value.code == 2


def test_files_are_compared_without_torch() -> None:
    script = (
        "import sys; from lrlhf.__main__ import main; "
        "assert main(['compare', 'runs/a_seed1', 'runs/b_seed1']) == 0; "
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules"
    )
    root = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[0] = {root!r}; {script}"],
                   check=True, stdout=subprocess.DEVNULL)  # fmt: skip


def letters(completions: list[str]) -> list[float]:
    return [float(len(set(text))) for text in completions]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["RLOO", "RewardModel"])
def test_models_are_evaluated_on_the_same_prompts(
    module: str, model_folder: str, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # of the reward
    rows = [{"prompt": f"say {one}", "chosen": one * 2, "rejected": one} for one in "abcdefgh"]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    policy = module == "RLOO"
    options = {"policy": {"source": "nowhere"}, "eval_sampling": {"max_new_tokens": 4}}
    config = experiment(
        module,
        options if policy else {"model": {"source": "nowhere"}},
        {"train": "rows.jsonl", "val": "rows.jsonl", "val_batch_size": 4},
        reward=f"{__name__}.letters",
        callbacks=[{"class_path": "EvalJSONL"}],
    )
    Path("run.yaml").write_text(yaml.safe_dump(config))
    shutil.copytree(model_folder, "copy/export/final")
    status = run(["compare", model_folder, "copy", "--config", "run.yaml", "--output", "out"])
    shown = capfd.readouterr()
    assert status == 0, shown.err
    # the same weights, prompts and seeds; a reward model's new head has the same seed too
    what = "score, one by one, on these 8 prompts" if policy else "accuracy, one by one, on these 8"
    assert shown.out.startswith(f"A and B have the same {what}")
    assert len(list(Path("out").glob("*/validate/*/eval_scores_0.jsonl"))) == 2


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would evaluate; each leaves a file where `lrlhf validate` would."""
    commands: list[list[str]] = []

    def validate(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(command[command.index("validate") :])
        root, model = Path(command[-1]), Path(command[-3])
        is_export = (model / "config.json").exists()
        write_run(root / "validate" / model.name if is_export else root, scored(A))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", validate)
    for export in ("base", "runs/a_seed1/export/final"):
        Path(export).mkdir(parents=True)
        Path(export, "config.json").write_text("{}")
    Path("runs/b_seed1/checkpoints").mkdir()
    Path("runs/b_seed1/checkpoints/last.ckpt").write_text("")
    Path("own.py").write_text(OWN)
    return commands


OWN = """
class Taken:
    def __init__(self, loss, *, model): ...

class Inherits(Taken): ...

class Bare: ...
"""


@pytest.mark.parametrize(
    ("model", "option"),
    [
        ("{class_path: RewardModel}", "--model.model"),
        ("{class_path: lrlhf.modules.PPO}", "--model.policy"),
        ("RewardModel", "--model.model"),
        ("{class_path: own.Taken}", "--model.model"),
        ("own.Inherits", "--model.model"),
    ],
)
def test_what_is_not_here_is_named_by_the_option_of_the_module(
    model: str, option: str, validated: list[list[str]], capsys: Capture
) -> None:
    Path("run.yaml").write_text(f"model: {model}")
    models = ["base", "runs/a_seed1", "runs/b_seed1", "org/name"]
    assert run(["compare", *models, "--config", "run.yaml", "--output", "out"]) == 0
    assert [command[3:5] for command in validated] == [
        ["--ckpt_path", "base"],
        ["--ckpt_path", "runs/a_seed1/export/final"],
        ["--ckpt_path", "runs/b_seed1/checkpoints/last.ckpt"],
        [option, "org/name"],
    ]
    assert "the same score, one by one" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("own.Bare", "own.Bare has none of the options policy and model"),
        ("own.Gone", "own.Gone: there is no such class"),
        ("", "run.yaml: no model.class_path"),
    ],
)
def test_a_module_that_takes_no_model_is_refused(
    model: str, told: str, validated: list[list[str]], capsys: Capture
) -> None:
    Path("run.yaml").write_text(f"model: {model}")
    assert told in refused(capsys, "base", "org/name", "--config", "run.yaml")
    assert validated == []


@pytest.mark.parametrize(
    ("model", "told"),
    [("./gone", "no model ./gone"), ("runs/a_seed2", "runs/a_seed2 is no model: it has neither")],
)
def test_models_are_checked_before_old_evaluations_go(
    model: str, told: str, validated: list[list[str]], capsys: Capture
) -> None:
    Path("run.yaml").write_text("model: RLOO")
    options = ("--config", "run.yaml", "--output", "out")
    assert run(["compare", "base", "runs/a_seed1", *options]) == 0
    old = sorted(Path("out").rglob("eval_scores_*"))
    capsys.readouterr()
    assert told in refused(capsys, "base", model, *options)
    assert len(validated) == len(old) == 2
    assert sorted(Path("out").rglob("eval_scores_*")) == old


def test_brackets_in_names_are_no_patterns_and_files_are_no_runs(capsys: Capture) -> None:
    shutil.copytree("runs/a_seed1", "runs/a[1]")
    assert "A: runs/a[1] (step 1)" in out(capsys, "runs/a[1]", "runs/b_seed1")
    Path("runs/b_notes.txt").write_text("")
    Path("runs/c.ckpt").write_text("")
    text = out(capsys, "runs/a_seed[12]", "runs/b_*")
    assert "B: runs/b_seed1 (step 1), runs/b_seed2 (step 1)" in text
    told = refused(capsys, "runs/a_seed1", "runs/b_notes.txt")
    assert "runs/b_notes.txt is a file; a run is a folder, such as runs" in told
    assert "nothing fits runs/b_n* but files" in refused(capsys, "runs/a_seed1", "runs/b_n*")
    assert "runs/c.ckpt is a file" in refused(capsys, "runs/a_seed1", "runs/c.ckpt")


def test_checkpoints_fit_a_pattern_where_models_are_evaluated(
    validated: list[list[str]], capsys: Capture
) -> None:
    for name in ("c1.ckpt", "c2.ckpt", "notes.txt"):
        Path(name).write_text("")
    Path("run.yaml").write_text("model: RLOO")
    assert run(["compare", "base", "c*", "n*", "--config", "run.yaml"]) == 2
    assert "nothing fits n* but files" in capsys.readouterr().err
    assert run(["compare", "base", "c*", "--config", "run.yaml"]) == 0
    assert [command[4] for command in validated] == ["base", "c1.ckpt", "c2.ckpt"]
